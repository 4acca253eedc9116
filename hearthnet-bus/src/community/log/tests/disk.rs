//! Full disks, killed processes, and damaged bytes.
//!
//! Other tests run the tests named `child_...`, in a process that is to be killed or in a mount
//! namespace. Without those, they do nothing.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::*;

/// Environment variable with the folder of a child.
const DIR: &str = "HEARTHNET_TEST_LOG_DIR";
/// File of the lock and the mark.
const LOCK: &str = "log.lock";
/// Exit code of a child if the machine does not allow the test.
const SKIP: i32 = 77;

fn child(test: &str, dir: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .arg(format!("{}::{test}", own_path()))
        .env(DIR, dir);
    command
}

fn ids(log: &EventLog) -> BTreeSet<String> {
    let mut ids = BTreeSet::new();
    log.records(|record| {
        ids.insert(record.event.id.to_string());
        Ok(true)
    })
    .unwrap();
    ids
}

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::yield_now();
    }
}

#[test]
#[ignore = "run by no_acknowledged_event_is_lost_whenever_a_writer_is_killed"]
fn child_that_writes_until_it_is_killed() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    let log = EventLog::open(Path::new(&dir)).unwrap();
    let mut out = std::io::stdout();
    let mut tell = |line: String| {
        writeln!(out, "{line}").unwrap();
        out.flush().unwrap();
    };
    let stranger = Author::new(key(2));
    for i in 0u64.. {
        let seed = 100 + u8::try_from(i % 100).unwrap();
        let write = |body| log.append(&key(1), body, NOW);
        let id = write(invited(seed, Level::Member, 1));
        if let Ok(id) = id.or_else(|_| write(withdrawn(seed, None))) {
            tell(format!("ack {id}"));
        }
        let now = NOW + i;
        let beat = stranger.say(now, now, shard_withdrawn("m:0-7"));
        if codes(&log, &[beat], now).is_empty() {
            tell(format!("beat {now}"));
        }
        if i % 16 == 15 {
            log.compact(now).unwrap();
        }
    }
}

/// Kills a process and waits for its end.
fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn no_acknowledged_event_is_lost_whenever_a_writer_is_killed() {
    // On a real disk, with real syncs.
    let dir = Home::in_folder(TempDir::new().unwrap()).closed();
    let mut acknowledged = BTreeSet::new();
    let mut beat: u64 = 0;
    for round in 0..30u32 {
        let mut writer = child("child_that_writes_until_it_is_killed", dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(writer.stdout.take().unwrap());
        // Kill the writer at a random time after a random number of acknowledgements.
        let mut random = [0; 2];
        getrandom::fill(&mut random).unwrap();
        let mut left = u32::from(random[0]) % 24;
        let mut line = String::new();
        let mut killed = Some(writer);
        while lines.read_line(&mut line).unwrap() > 0 {
            match line.trim().split_once(' ') {
                Some(("ack", id)) => {
                    acknowledged.insert(id.to_owned());
                }
                Some(("beat", at)) => beat = beat.max(at.parse().unwrap()),
                _ => {
                    line.clear();
                    continue;
                }
            }
            line.clear();
            if left == 0
                && let Some(writer) = killed.take()
            {
                for _ in 0..u32::from(random[1]) * 400 {
                    std::hint::spin_loop();
                }
                kill(writer);
            }
            left = left.saturating_sub(1);
        }
        assert!(
            killed.is_none(),
            "the writer of round {round} ended by itself"
        );
        let log = EventLog::open(dir.path()).unwrap();
        assert_eq!((log.recovery(), log.is_in_doubt()), (None, false));
        let found = ids(&log);
        let lost: Vec<_> = acknowledged.difference(&found).collect();
        assert_eq!(lost, Vec::<&String>::new(), "in round {round}");
        assert_sound(&log);
        let heads = log.heads();
        let slots = heads.authors.get(&id(2));
        assert_eq!(slots, None, "key 2 is a stranger");
        assert!(log.is_consistent());
    }
    println!(
        "{} acknowledged events, last beat {beat}",
        acknowledged.len()
    );
    assert!(acknowledged.len() > 30);
}

#[test]
#[ignore = "run by a_full_disk_makes_the_log_read_only"]
fn child_on_a_small_disk() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    let dir = Path::new(&dir);
    let data = dir.join("data");
    let log = EventLog::create(&data, &root(), id(1), "E", Policy::default(), NOW).unwrap();
    // Fill the disk except for a few pages.
    let mut ballast = std::fs::File::create(dir.join("ballast")).unwrap();
    while ballast.write_all(&[7; 4096]).is_ok() {}
    let size = ballast.metadata().unwrap().size();
    ballast.set_len(size - 64 * 1024).unwrap();

    let mut acknowledged = BTreeSet::new();
    let mut me = 0;
    let error = loop {
        assert!(me < 10_000, "the disk never filled up");
        me += 1;
        let seed = (me % 256) as u8;
        let body = match me / 256 % 2 {
            0 => invited(seed, Level::Member, 1),
            _ => withdrawn(seed, None),
        };
        match log.append(&key(1), body, NOW) {
            Ok(id) => acknowledged.insert(id.to_string()),
            Err(LogError::NoEffect(_)) => continue,
            Err(error) => break error,
        };
    };
    println!("{} events, then: {error}", acknowledged.len());
    assert_eq!(error.code(), "log_read_only");
    let LogHealth::ReadOnly { reason, since_ms } = log.health() else {
        panic!("{:?}", log.health());
    };
    println!("{reason}");
    assert_eq!(since_ms, NOW);
    // Reading still works, here and in other processes; writing fails with its error.
    assert_eq!(log.state().level(&id(1)), Some(Level::Anchor));
    assert!(
        !log.missing(&Heads::empty(log.community()), 99, 1 << 20)
            .unwrap()
            .events
            .is_empty()
    );
    let beat = Author::new(key(1)).say(1, NOW, shard_withdrawn("m"));
    let refused = (0..50)
        .map(|_| log.receive(std::slice::from_ref(&beat), id(9), NOW))
        .find_map(Result::err);
    drop(refused);

    // With free space again, the log recovers by itself.
    std::fs::remove_file(dir.join("ballast")).unwrap();
    drop(ballast);
    wait("recovery", || log.health() == LogHealth::Ok);
    let id = log.append(&root(), policy(false), NOW).unwrap();
    acknowledged.insert(id.to_string());
    assert!(acknowledged.is_subset(&ids(&log)));
    assert_sound(&log);
    drop(log);
    let log = EventLog::open(&data).unwrap();
    assert_eq!(log.recovery(), None);
    assert!(acknowledged.is_subset(&ids(&log)));
}

#[test]
fn a_full_disk_makes_the_log_read_only_and_room_makes_it_writable_again() {
    let dir = TempDir::new().unwrap();
    let run = child("child_on_a_small_disk", dir.path());
    let script = format!("mount -t tmpfs -o size=2m tmpfs \"${DIR}\" || exit {SKIP}; exec \"$@\"");
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--user",
        "--map-root-user",
        "--propagation",
        "private",
    ]);
    command.args(["sh", "-c", &script, "sh"]);
    command
        .arg(run.get_program())
        .args(run.get_args())
        .env(DIR, dir.path());
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => return println!("skipped: there is no unshare ({error})"),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(SKIP) || errors.contains("unshare failed") {
        return println!("skipped: no mounts in a namespace here ({})", errors.trim());
    }
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(text.contains("1 passed"), "{text}\n{errors}");
    println!("{text}");
}

/// Path of these tests for the test runner: without the crate.
fn own_path() -> &'static str {
    module_path!().split_once("::").unwrap().1
}

/// Copies the files of a log to a new folder: a backup if it is closed, the state after a crash if
/// it is open.
fn copied(dir: &TempDir) -> TempDir {
    let copy = folder();
    for file in std::fs::read_dir(dir.path()).unwrap() {
        let file = file.unwrap();
        if !file.file_name().to_string_lossy().ends_with("-shm") {
            std::fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
        }
    }
    copy
}

/// A community with three members and some history.
fn busy() -> Home {
    let home = Home::new();
    home.admit(2, Level::Trusted);
    home.admit(3, Level::Trusted);
    for i in 0..20 {
        home.append(ROOT, policy(i % 2 == 0));
    }
    home
}

/// An event of the founder that is new in [`busy`].
fn new_event() -> Body {
    invited(61, Level::Member, 1)
}

/// Code of the report at the opening of a log. If there is one, the log is in doubt.
fn report(home: &Home) -> Option<Code> {
    let recovery = home.log.recovery()?;
    assert!(home.log.is_in_doubt());
    Some(recovery.code())
}

/// Length of the write-ahead log.
fn wal_len(dir: &TempDir) -> u64 {
    let wal = dir.path().join("log.sqlite-wal");
    std::fs::metadata(wal).unwrap().len()
}

#[test]
fn an_incomplete_write_is_dropped_and_lost_events_are_reported() {
    let home = busy();
    let before = ids(&home.log);
    let whole = copied(&home.dir);
    home.append(1, invited(60, Level::Member, 1));
    let (wal, longer) = (wal_len(&whole), wal_len(&home.dir));
    assert!(longer > wal);
    let cuts = [1, 24, 25, 4096].map(|more| wal + more);
    for cut in cuts.into_iter().chain([longer - 4097, longer - 1]) {
        for acknowledged in [false, true] {
            let copy = copied(&home.dir);
            let path = copy.path().join("log.sqlite-wal");
            let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
            file.set_len(cut).unwrap();
            if !acknowledged {
                // The crash came before the event was stored: the mark does not count it.
                std::fs::copy(whole.path().join(LOCK), copy.path().join(LOCK)).unwrap();
            }
            let found = Home::opened(copy);
            assert_eq!(ids(&found.log), before, "cut to {cut}");
            let lost = acknowledged.then(|| Code::new("log_recovered"));
            assert_eq!(report(&found), lost, "cut to {cut}");
            assert_sound(&found.log);
            // The log takes this for a restored copy; after a real crash it would be the same file.
            found.log.caught_up(NOW).unwrap();
            found.append(1, new_event());
        }
    }
    let whole = Home::opened(whole);
    assert_eq!((report(&whole), ids(&whole.log)), (None, before));
}

#[test]
fn a_flipped_bit_in_the_tail_is_detected_and_peers_send_the_lost_events() {
    let home = busy();
    let copy = copied(&home.dir);
    let path = copy.path().join("log.sqlite-wal");
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.len() - 3 * 4120;
    bytes[at] ^= 4;
    std::fs::write(&path, bytes).unwrap();
    let found = Home::opened(copy);
    assert_eq!(report(&found), Some(Code::new("log_recovered")));
    assert!(ids(&found.log).len() < ids(&home.log).len());
    assert_sound(&found.log);
    // Lost events may be this node's own, and other nodes may have them: no writing before a sync.
    found.refuses(1, new_event(), "log_behind");
    sync(&home.log, &found.log, NOW);
    found.log.caught_up(NOW).unwrap();
    assert_eq!(found.log.state(), home.log.state());
    found.append(1, new_event());
    assert_eq!(found.log.state().frozen().count(), 0);
}

#[test]
fn a_mark_that_is_ahead_missing_or_damaged_is_doubt_and_one_that_is_behind_is_none() {
    let dir = busy().closed();
    let [file, lock] = [FILE_NAME, LOCK].map(|name| dir.path().join(name));
    let mode = std::fs::metadata(&lock).unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);
    let [old, behind] = [&file, &lock].map(|path| std::fs::read(path).unwrap());
    let home = Home::opened(dir);
    home.append(1, invited(60, Level::Member, 1));
    let dir = home.closed();
    let [new, right] = [&file, &lock].map(|path| std::fs::read(path).unwrap());
    let mut damaged = right.clone();
    damaged[20] ^= 1;
    for (content, mark, doubt, reported) in [
        (&new, &right, false, false),
        // A crash between the commit and its mark.
        (&new, &behind, false, false),
        (&new, &damaged, true, false),
        (&new, &Vec::new(), true, false),
        // An older copy of the log, laid over the same file.
        (&old, &right, true, true),
    ] {
        std::fs::write(&file, content).unwrap();
        std::fs::write(&lock, mark).unwrap();
        let log = EventLog::open(dir.path()).unwrap();
        let found = (log.is_in_doubt(), log.recovery().is_some());
        assert_eq!(found, (doubt, reported), "{mark:?}");
        assert_eq!(log.append(&key(1), new_event(), NOW).is_err(), doubt);
    }
}

#[test]
fn a_restored_copy_writes_nothing_before_a_sync_and_does_not_fork() {
    let dir = busy().closed();
    let other = Home::joining();
    let backup = copied(&dir);
    // More events after the backup, which other nodes receive.
    let home = Home::opened(dir);
    assert!(!home.log.is_in_doubt(), "the file is where it was");
    home.append(1, invited(60, Level::Member, 1));
    sync(&home.log, &other.log, NOW);
    drop(home);

    let restored = Home::opened(backup);
    assert!(restored.log.is_in_doubt());
    restored.refuses(1, new_event(), "log_behind");
    // Ephemeral events are allowed: they use no number of the chain.
    restored.append(1, seen("attic"));
    sync(&other.log, &restored.log, NOW);
    restored.log.caught_up(NOW).unwrap();
    assert!(!restored.log.is_in_doubt());
    restored.append(1, new_event());
    sync(&restored.log, &other.log, NOW);
    let state = other.log.state();
    assert_eq!(state, restored.log.state());
    assert_eq!(state.frozen().count(), 0);
    for seed in [60, 61] {
        assert!(state.invite(&id(seed)).is_some());
    }
    // For this file, asking once is enough.
    assert!(!restored.reopened().log.is_in_doubt());
}

/// The founder's log after a fault of its disk, which has lost an own event; and the log of another
/// member, which has that event.
fn forgetful() -> (Home, Home) {
    let dir = busy().closed();
    let file = dir.path().join(FILE_NAME);
    let old = std::fs::read(&file).unwrap();
    let (home, other) = (Home::opened(dir), Home::joining());
    home.append(1, invited(60, Level::Member, 1));
    sync(&home.log, &other.log, NOW);
    let dir = home.closed();
    std::fs::write(&file, old).unwrap();
    (Home::opened(dir), other)
}

#[test]
fn a_log_that_lost_own_events_waits_for_them_or_until_all_members_were_asked() {
    let asked = |home: &Home, seed| {
        let (own, peer) = (id(1), id(seed));
        home.log.asked(own, peer, NOW).unwrap();
    };
    let (found, other) = forgetful();
    assert_eq!(report(&found), Some(Code::new("log_recovered")));
    // A member that lacks the event, too.
    asked(&found, 3);
    found.refuses(1, new_event(), "log_behind");
    sync(&other.log, &found.log, NOW);
    found.log.maintain(&key(1), NOW).unwrap();
    found.append(1, new_event());
    sync(&found.log, &other.log, NOW);
    assert_eq!(other.log.state().frozen().count(), 0);
    assert!(!found.reopened().log.is_in_doubt());

    let (found, _) = forgetful();
    asked(&found, 3);
    let found = found.reopened();
    asked(&found, 3);
    found.refuses(1, new_event(), "log_behind");
    asked(&found, 2);
    found.append(1, new_event());
}

#[test]
fn the_root_writes_in_a_log_that_lost_own_events() {
    let (found, other) = forgetful();
    found.refuses(1, new_event(), "log_behind");
    found.log.append(&root(), policy(false), NOW).unwrap();
    sync(&found.log, &other.log, NOW);
    sync(&other.log, &found.log, NOW);
    assert_eq!(other.log.state(), found.log.state());
    assert_eq!(other.log.state().frozen().count(), 0);
}

#[test]
fn a_copy_asks_all_members_that_run() {
    let copy = Home::opened(copied(&busy().closed()));
    copy.append(2, seen("attic"));
    copy.log.asked(id(1), id(3), NOW).unwrap();
    copy.refuses(1, new_event(), "log_behind");
    // The other one has gone.
    let later = NOW + ADVERT_LIFE_MS;
    copy.log.maintain(&key(1), later).unwrap();
    assert!(!copy.log.is_in_doubt());
}

#[test]
fn a_copy_that_two_processes_open_at_once_is_in_doubt_at_the_next_opening() {
    let dir = busy().closed();
    let copy = copied(&dir);
    // Neither process has the log alone, so neither compares it with the mark.
    let other = std::fs::File::open(copy.path().join(LOCK)).unwrap();
    other.lock_shared().unwrap();
    let home = Home::opened(copy);
    home.append(1, new_event());
    drop(other);
    assert!(home.reopened().log.is_in_doubt());
}

#[test]
fn a_backup_of_an_open_log_comes_back_with_its_parts_and_in_doubt() {
    let home = busy();
    let dir = folder();
    let file = dir.path().join("home.backup");
    let parts = backup::Parts::from([("node.key".to_owned(), b"secret".to_vec())]);
    backup::write(&file, Some(&home.log), &parts).unwrap();
    let mode = std::fs::metadata(&file).unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(backup::write(&file, Some(&home.log), &parts).is_err());
    // The folder holds only the backup.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);

    assert_eq!(backup::read(&file).unwrap(), (parts, true));
    let to = folder();
    backup::restore_log(&file, to.path()).unwrap();
    let again = backup::restore_log(&file, to.path());
    assert!(matches!(again, Err(LogError::Exists { .. })));
    let restored = Home::opened(to);
    assert_eq!(restored.log.state(), home.log.state());
    assert_sound(&restored.log);
    assert!(restored.log.is_in_doubt());
    restored.refuses(1, new_event(), "log_behind");
}

#[test]
fn a_foreign_or_damaged_file_is_refused_as_a_backup() {
    let home = busy();
    let dir = folder();
    assert!(backup::read(home.log.path()).is_err(), "a log is no backup");
    let file = dir.path().join("a");
    backup::write(&file, Some(&home.log), &backup::Parts::new()).unwrap();
    let good = std::fs::read(&file).unwrap();
    for page in 0..good.len() / 4096 {
        let mut bytes = good.clone();
        bytes[page * 4096..(page + 1) * 4096]
            .iter_mut()
            .for_each(|b| *b ^= 0x55);
        std::fs::write(&file, &bytes).unwrap();
        // An unused page may have any content; data that is readable must be intact.
        if backup::read(&file).is_ok() {
            let to = folder();
            if backup::restore_log(&file, to.path()).is_ok() {
                assert_sound(&Home::opened(to).log);
            }
        }
    }
    assert!(backup::read(&dir.path().join("missing")).is_err());
}

#[test]
fn a_backup_with_one_flipped_bit_in_an_event_is_refused_and_leaves_nothing() {
    let home = busy();
    let dir = folder();
    let file = dir.path().join("a");
    backup::write(&file, Some(&home.log), &backup::Parts::new()).unwrap();
    let good = std::fs::read(&file).unwrap();
    let mut raws = Vec::new();
    home.log
        .records(|record| {
            raws.push(record.raw.to_vec());
            Ok(true)
        })
        .unwrap();
    assert!(raws.len() > 3);
    let mut flipped = 0;
    for raw in raws {
        // Only copies within one page are found. SQLite leaves copies in the unused part of pages.
        let copies = good.windows(raw.len()).enumerate();
        let copies = copies.filter(|(_, bytes)| *bytes == raw);
        let copies: Vec<usize> = copies.map(|(at, _)| at).collect();
        if copies.is_empty() {
            continue;
        }
        let mut bytes = good.clone();
        for at in copies {
            bytes[at + raw.len() / 2] ^= 4;
        }
        std::fs::write(&file, &bytes).unwrap();
        let to = folder();
        let refused = backup::read(&file).and_then(|_| backup::restore_log(&file, to.path()));
        assert!(
            matches!(refused, Err(LogError::Corrupt { .. })),
            "{refused:?}"
        );
        assert_eq!(std::fs::read_dir(to.path()).unwrap().count(), 0);
        flipped += 1;
    }
    assert!(flipped > 3, "{flipped}");
}

#[test]
fn a_restored_log_without_other_members_may_write() {
    let dir = Home::new().closed();
    Home::opened(copied(&dir)).append(1, new_event());
}

#[test]
fn a_lost_log_is_filled_by_a_peer_before_it_writes() {
    let home = busy();
    let dir = folder();
    let log = EventLog::prepare_again(dir.path(), community()).unwrap();
    let again = Home { log, dir };
    again.refuses(1, new_event(), "log_behind");
    sync(&home.log, &again.log, NOW);
    again.refuses(1, new_event(), "log_behind");
    again.log.caught_up(NOW).unwrap();
    again.append(1, new_event());
    assert_eq!(again.log.state().frozen().count(), 0);
}

/// Copies the file that names the community.
fn copy_name(from: &TempDir, to: &TempDir) {
    let [from, to] = [from, to].map(|dir| dir.path().join("log.community"));
    std::fs::copy(from, to).unwrap();
}

#[test]
fn a_damaged_file_is_moved_aside_and_rebuilt_whichever_page_it_is() {
    let home = busy();
    let state = home.log.state();
    let copy = copied(&home.dir);
    // Opened alone and closed, so that the main file has all content.
    drop(EventLog::open(copy.path()).unwrap());
    let path = copy.path().join(FILE_NAME);
    let good = std::fs::read(&path).unwrap();
    assert_eq!(std::fs::read_dir(copy.path()).unwrap().count(), 3);
    let mut rebuilt = 0;
    let pages = good.len() / 4096;
    for page in 0..pages {
        for damage in 0..3 {
            let dir = folder();
            let mut bytes = good.clone();
            let body = &mut bytes[page * 4096..(page + 1) * 4096];
            match damage {
                0 => body.fill(0),
                1 => body.iter_mut().for_each(|b| *b ^= 0x55),
                // Flips one bit near the end of the page, where its contents are.
                _ => body[4090] ^= 1,
            }
            std::fs::write(dir.path().join(FILE_NAME), &bytes).unwrap();
            copy_name(&copy, &dir);
            let aside = dir.path().join("log.sqlite.damaged-0");
            let log = EventLog::open(dir.path()).unwrap();
            assert_eq!(log.community(), community());
            if let Some(recovery) = log.recovery() {
                assert_eq!(recovery.code(), "log_recovered");
                assert_eq!(std::fs::read(aside).unwrap().len(), bytes.len());
                rebuilt += 1;
            }
            // The remaining events are correct, and a peer sends the rest.
            assert_sound(&log);
            sync(&home.log, &log, NOW);
            assert_eq!(log.state(), state, "page {page}, damage {damage}");
        }
    }
    println!("{rebuilt} of {} damaged files were rebuilt", 3 * pages);
    assert!(rebuilt > pages);
}

#[test]
fn a_file_that_is_no_database_is_rebuilt_from_its_name_alone() {
    let home = busy();
    let dir = folder();
    std::fs::write(dir.path().join(FILE_NAME), b"not a database at all").unwrap();
    let error = EventLog::open(dir.path()).unwrap_err();
    assert_eq!(error.code(), "log_corrupt");
    copy_name(&home.dir, &dir);
    let found = Home::opened(dir);
    assert_eq!(report(&found), Some(Code::new("log_recovered")));
    assert!(!found.log.state().is_created());
    sync(&home.log, &found.log, NOW);
    assert_eq!(found.log.state(), home.log.state());
}

#[test]
fn a_newer_programs_file_and_another_programs_are_left_alone() {
    let home = Home::new();
    let path = home.dir.path().join(FILE_NAME);
    drop(home.log);
    let conn = rusqlite::Connection::open(&path).unwrap();
    conn.pragma_update(None, "user_version", 99).unwrap();
    drop(conn);
    let before = std::fs::read(&path).unwrap();
    let error = EventLog::open(home.dir.path()).unwrap_err();
    assert!(matches!(error, LogError::Format { found: 99, .. }));
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn the_file_of_an_older_program_is_brought_up_to_date_and_says_the_same() {
    let home = busy();
    let hash = home.log.state().state_hash();
    let path = home.log.path().to_owned();
    let dir = home.closed();
    let conn = rusqlite::Connection::open(&path).unwrap();
    conn.execute_batch(
        "DROP INDEX durable_ordered; CREATE INDEX durable_in_order ON durable (lamport, author, seq)",
    )
    .unwrap();
    drop(conn);
    let log = EventLog::open(dir.path()).unwrap();
    assert_eq!(log.state().state_hash(), hash);
    assert_sound(&log);
    let conn = rusqlite::Connection::open(&path).unwrap();
    let names = "SELECT group_concat(name) FROM sqlite_schema WHERE name LIKE 'durable_%order%'";
    let names: String = conn.query_row(names, [], |row| row.get(0)).unwrap();
    assert_eq!(names, "durable_ordered");
}

#[test]
fn events_that_wait_for_a_wrong_clock_outlast_a_full_disk() {
    let home = Home::new();
    home.admit(2, Level::Member);
    let other = home.replica();
    let next = |seed, body| {
        let heads = home.log.heads();
        home.append(seed, body);
        home.log.missing(&heads, 64, 1 << 20).unwrap().events
    };
    let receive = |raw: &[Vec<u8>], now| other.log.receive(raw, id(99), now);
    other.log.fill_disk(true);
    let refused = (0..1000)
        .map(|n| next(1, named(&format!("name {n}"))))
        .find(|raw| receive(raw, NOW).is_err())
        .expect("a full disk");
    let (revocation, behind) = (next(ROOT, revoked(2, 0)), NOW - 2 * MAX_AHEAD_MS);
    assert_eq!(codes(&other.log, &revocation, behind), ["log_time"]);
    // A peer sends again what the disk refused, but not what the clock did.
    assert!(receive(&refused, NOW).is_err());
    assert!(!other.log.state().is_revoked(&id(2)));
    other.log.fill_disk(false);
    other.takes(&refused);
    assert!(other.log.state().is_revoked(&id(2)));
}
