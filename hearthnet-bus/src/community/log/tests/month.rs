//! Merely running does not grow the log.

use super::*;

/// Interval of a host's advertisements, in ms.
const BEAT_MS: u64 = 30_000;

/// Simulates hours of heartbeats from `hosts` hosts. Returns the size of the files after each hour.
fn run(hosts: u8, hours: u64) -> Vec<u64> {
    let home = Home::new();
    let mut me = founder();
    let mut events = vec![me.make(invited(50, Level::Trusted, u32::from(hosts)))];
    for host in 2..2 + hosts {
        events.push(me.make(admitted(50, host, Level::Trusted)));
    }
    home.takes(&events);
    let hosts: Vec<_> = (2..2 + hosts).map(|host| Author::new(key(host))).collect();
    let mut sizes = vec![];
    let mut now = NOW;
    for _ in 0..hours {
        for beat in 0..3_600_000 / BEAT_MS {
            now += BEAT_MS;
            let beats: Vec<_> = hosts
                .iter()
                .flat_map(|host| {
                    let advert = advert(&host.key, 0);
                    // Node announcements are less frequent than advertisements.
                    let seen = (beat % 4 == 0).then(|| seen("attic"));
                    [Some(advert), seen]
                        .into_iter()
                        .flatten()
                        .map(|body| host.say(now, now, body))
                })
                .collect();
            assert_eq!(codes(&home.log, &beats, now), [""; 0]);
            if beat % 10 == 0 {
                home.log.compact(now).unwrap();
            }
        }
        assert_eq!(home.log.state().shards(now).count(), hosts.len());
        let files = std::fs::read_dir(home.dir.path()).unwrap();
        sizes.push(
            files
                .map(|file| file.unwrap().metadata().unwrap().len())
                .sum(),
        );
    }
    assert_sound(&home.log);
    sizes
}

#[test]
fn heartbeats_do_not_grow_the_log() {
    let sizes = run(20, 4);
    assert_eq!(sizes[1], sizes[3], "{sizes:?}");
}
