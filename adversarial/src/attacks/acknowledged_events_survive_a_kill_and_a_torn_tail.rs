//! A node must not lose an event that it has acknowledged. It may be killed at any moment, the end
//! of its file may be torn, and bits may flip. It recovers by itself, reports what it found, and
//! gets damaged events back from other nodes.

use std::path::Path;

use hearthnet_bus::log::FILE_NAME;
use tokio::sync::watch;

use super::prelude::*;
use crate::victim::Victim;

/// Number of times the node is killed while it writes.
const KILLS: usize = 6;
/// Acknowledged events before each kill.
const BEFORE: u64 = 12;
/// Bytes of an incomplete write.
const TORN: [u8; 777] = [0x5a; 777];
/// Offset in the first page of the write-ahead log, behind the headers of the file and of the page.
const IN_FIRST_PAGE: u64 = 32 + 24 + 500;

/// Writer of events, and the number of acknowledged ones.
struct Writing {
    member: NodeKey,
    community: [u8; 32],
    events: Vec<Vec<u8>>,
    acknowledged: usize,
}

impl Writing {
    async fn gossip(&self, keeper: &Victim) -> Result<Gossip> {
        Gossip::open(keeper.addr, &self.member, &self.community).await
    }

    /// Writes until the node is killed, some events later.
    async fn until_killed(&mut self, keeper: Victim) -> Result<()> {
        let mut gossip = self.gossip(&keeper).await?;
        let left = self
            .events
            .get(self.acknowledged..)
            .unwrap_or_default()
            .to_vec();
        let (count, mut counted) = watch::channel(0);
        let writing = tokio::spawn(async move {
            for event in left {
                match gossip.push(&[event]).await {
                    Pushed::Stored { .. } => count.send_modify(|count| *count += 1),
                    Pushed::Closed(_) => break,
                }
            }
            *count.borrow()
        });
        // An error means that all is written, or that the node has ended.
        let _ = counted.wait_for(|&count| count >= BEFORE).await;
        keeper.kill().await?;
        self.acknowledged += writing.await? as usize;
        Ok(())
    }
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [member, _] = bench.members();
    let test_community = bench.community()?;
    let home = test_community.home("keeper")?;
    let author = test_community.guest.key().id();
    let events = (0..1000).map(|n: u32| test_community.guest.note(200, n as u8));
    let mut writing = Writing {
        member,
        community: test_community.community,
        events: events.collect(),
        acknowledged: 0,
    };
    let whole = async |found: &mut Findings, what: &str, least: usize| {
        let mut keeper = bench.another(&home).await?;
        let gauges = keeper.gauges().await?;
        let kept = gauges.events_of(&author);
        let held = kept >= least as u64;
        found.check(what, format!("at least {least} events"), kept, held);
        let log = gauges.log.unwrap_or_default();
        let sound = log.problems.is_empty() && log.is_healthy;
        let what = format!("{what}: the log");
        found.check_or(what, "sound", sound, || format!("{:?}", log.problems));
        Ok::<_, HarnessError>((keeper, log.recovered))
    };

    let (mut keeper, _) = whole(found, "a new node", 0).await?;
    for _ in 0..KILLS {
        writing.until_killed(keeper).await?;
        (keeper, _) = whole(found, "killed while it wrote", writing.acknowledged).await?;
    }
    let some = writing.acknowledged;
    let held = some >= KILLS * BEFORE as usize;
    let what = "events that were acknowledged";
    found.check(what, "some for each kill", some, held);

    writing.until_killed(keeper).await?;
    change(&home, |wal| wal.extend_from_slice(&TORN))?;
    let what = "a torn write at the end";
    let (keeper, _) = whole(found, what, writing.acknowledged).await?;

    writing.until_killed(keeper).await?;
    change(&home, |wal| {
        if let Some(byte) = wal.get_mut(IN_FIRST_PAGE as usize) {
            *byte ^= 0x10;
        }
    })?;
    // The node may have lost acknowledged events, and reports it.
    let (mut keeper, recovered) = whole(found, "a flipped bit", 0).await?;
    let said = recovered.unwrap_or_else(|| "nothing".into());
    let what = "the reported recovery of a flipped bit";
    found.same(what, "log_recovered", said);
    let again = writing
        .events
        .get(..writing.acknowledged)
        .unwrap_or_default();
    let pushed = writing.gossip(&keeper).await?.push(again).await;
    let held = matches!(pushed, Pushed::Stored { refused: 0, .. });
    let seen = format!("{pushed:?}");
    found.check("events that other nodes have", "taken", seen, held);
    let kept = keeper.gauges().await?.events_of(&author);
    let held = kept >= writing.acknowledged as u64;
    let all = format!("at least {} events", writing.acknowledged);
    found.check("events that it has then", all, kept, held);

    let (status, log) = keeper.stop().await;
    let held = status.is_some_and(|status| status.success()) && !log.contains("panicked");
    found.check("its exit after a request to stop", "ordinary", log, held);
    bench.still_works(found).await
}

/// Changes the write-ahead log of a killed node.
fn change(home: &Path, change: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
    let path = home.join(format!("{FILE_NAME}-wal"));
    let mut wal = std::fs::read(&path)?;
    if wal.len() as u64 <= IN_FIRST_PAGE {
        return Err(HarnessError::victim(
            "it was killed and left no log of writes",
        ));
    }
    change(&mut wal);
    Ok(std::fs::write(&path, wal)?)
}
