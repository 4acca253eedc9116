//! A node that has acknowledged an event has it, whatever becomes of its process a moment later. It
//! may be killed at any moment, the end of its file may be torn, and bits of it may have changed:
//! it comes back by itself, says what it found, and what damage took from it comes back from
//! others.

use std::path::Path;

use hearthnet_bus::NodeKey;
use hearthnet_bus::log::FILE_NAME;
use tokio::sync::watch;

use crate::raw::{Gossip, Pushed};
use crate::victim::Victim;
use crate::{Bench, Findings, HarnessError};

/// Times that the node is killed while it writes.
const KILLS: usize = 6;
/// Events that are acknowledged before each of them.
const BEFORE: u64 = 12;
/// Bytes of a write that was never finished.
const TORN: [u8; 777] = [0x5a; 777];
/// A place in the first page of the write-ahead log, behind its header and the page's own.
const IN_FIRST_PAGE: u64 = 32 + 24 + 500;

/// Who writes, what, and how much of it was acknowledged.
struct Writing {
    member: NodeKey,
    community: [u8; 32],
    events: Vec<Vec<u8>>,
    acknowledged: usize,
}

impl Writing {
    async fn gossip(&self, keeper: &Victim) -> Result<Gossip, HarnessError> {
        Gossip::open(keeper.addr, &self.member, &self.community).await
    }

    /// Writes until the node is killed, some events later.
    async fn until_killed(&mut self, keeper: Victim) -> Result<(), HarnessError> {
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
        // An error means that all is written, or the node gone already.
        let _ = counted.wait_for(|&count| count >= BEFORE).await;
        keeper.kill().await?;
        self.acknowledged += writing.await? as usize;
        Ok(())
    }
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [member, _] = bench.members();
    let test_community = bench.test_community()?;
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
    // It may have lost what it had acknowledged, and says so.
    let (mut keeper, recovered) = whole(found, "a flipped bit", 0).await?;
    let said = recovered.unwrap_or_else(|| "nothing".into());
    found.same("what it says of a flipped bit", "log_recovered", said);
    let again = writing
        .events
        .get(..writing.acknowledged)
        .unwrap_or_default();
    let pushed = writing.gossip(&keeper).await?.push(again).await;
    let held = matches!(pushed, Pushed::Stored { refused: 0, .. });
    let seen = format!("{pushed:?}");
    found.check("what others have of it", "taken", seen, held);
    let kept = keeper.gauges().await?.events_of(&author);
    let held = kept >= writing.acknowledged as u64;
    let all = format!("at least {} events", writing.acknowledged);
    found.check("what it has then", all, kept, held);

    let (status, log) = keeper.stop().await;
    let held = status.is_some_and(|status| status.success()) && !log.contains("panicked");
    found.check("its end when told to", "ordinary", log, held);
    bench.goes_on(found).await?;
    Ok(())
}

/// Changes the write-ahead log that a killed node left behind.
fn change(home: &Path, change: impl FnOnce(&mut Vec<u8>)) -> Result<(), HarnessError> {
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
