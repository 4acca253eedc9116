//! The scene of logs: four members with their event logs on disk, and gossip between all of them.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hearthnet_bus::log::{Body, EventLog};
use hearthnet_testkit::memory_folder;
use parking_lot::Mutex;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, sleep_until};

use crate::faults::{Fault, Scene, Schedule};
pub use crate::member::Founded;
use crate::member::{Known, MEMBERS, Member, REVOKED, key};
use crate::net::{Direction, Net, Node, Ways};
use crate::observer::{Observer, Report};
use crate::random::Random;
use crate::run::in_virtual_time;

/// Virtual time within which all logs are equal after the end of all faults.
const CONVERGE_WITHIN: Duration = Duration::from_secs(300);
/// Time in which members write.
const WRITING: Duration = Duration::from_millis(4_500);

/// A fault of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::VariantArray)]
pub enum Kind {
    /// The process dies, and starts again later from its disk.
    Crash,
    /// The same in the middle of a write: the end of the write-ahead log is garbage.
    TornWrite,
    /// The same on a disk that has lost its last writes, although it acknowledged them.
    LostWrites,
    /// The disk has no room, also for a process that starts meanwhile.
    FullDisk,
    /// The process stands still, as when a laptop sleeps.
    Pause,
    /// The clock is wrong, by up to 20 minutes in either direction, until the end.
    ClockJump,
    /// No packets in either direction.
    Partition,
    /// No packets to the member.
    PartitionIn,
    /// No packets from the member.
    PartitionOut,
    /// Packets take 40 times as long.
    SlowLink,
    /// A bit of the member's next packets changes.
    DamagedPacket,
    /// An anchor revokes the last member for ever.
    Revoke,
}

/// The scene.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Logs {}

impl Scene for Logs {
    type Kind = Kind;

    const OPTION: &'static str = " --logs";
    const NODES: usize = MEMBERS;
}

/// Runs a schedule.
pub fn run(founded: &Founded, schedule: &Schedule<Logs>) -> Report {
    in_virtual_time(scene(founded, schedule))
}

async fn scene(founded: &Founded, schedule: &Schedule<Logs>) -> Report {
    let begin = Instant::now();
    let (observer, net) = (Observer::begin(), Net::new(schedule.seed));
    let run = observer.actor("run");
    let (known, dir) = (Arc::new(Mutex::<Known>::default()), memory_folder());
    let members: Vec<Rc<Member>> = (0..MEMBERS)
        .map(|node| {
            let dir = dir.path().join(node.to_string());
            Rc::new(Member::new(node, founded, dir, &net, &observer, &known))
        })
        .collect();
    members.iter().for_each(|member| member.start());
    let end = begin + schedule.end().max(WRITING);
    let mut tasks = Vec::new();
    for (number, fault) in (0..).zip(&schedule.faults) {
        let (fault, all) = (*fault, members.clone());
        let random = Random::new(schedule.seed, 500 + number);
        tasks.push(spawn_local(async move {
            happen(fault, begin, &all, random).await;
        }));
    }
    for member in &members {
        let member = Rc::clone(member);
        let mut random = Random::new(schedule.seed, 900 + member.node as u64);
        tasks.push(spawn_local(async move {
            let mut number = 0;
            while begin.elapsed() < WRITING {
                sleep(Duration::from_millis(random.between(50, 700))).await;
                number += 1;
                let name = format!("name {number}");
                member.write(Body::Named { name });
                if random.one_in(4) {
                    member.upkeep();
                }
                member.check_heads();
            }
        }));
    }
    for task in tasks {
        if let Err(error) = task.await {
            run.violated(format!("a task failed: {error}"));
        }
    }
    sleep_until(end).await;
    let healed = Instant::now();
    let is_revoked = |node: Node| {
        let revoked = key(node).id();
        let mut logs = members.iter().filter_map(|member| member.log());
        logs.any(|log| log.state().is_revoked(&revoked))
    };
    loop {
        let left = || members.iter().filter(|member| !is_revoked(member.node));
        let heads: Vec<_> = left().map(|member| member.check_heads()).collect();
        // All members are there, so each log has its own events back, or knows that they are lost.
        let doubts = left().any(|member| member.log().is_some_and(|log| log.is_in_doubt()));
        let seconds = healed.elapsed().as_secs();
        let lengths: Vec<u64> = heads
            .iter()
            .map(|heads| heads.iter().flatten().map(|(_, (seq, _))| seq).sum())
            .collect();
        let are_equal = heads.windows(2).all(|pair| pair.first() == pair.last());
        // Before, some logs receive events at this moment, and the trace has no order within one.
        if are_equal && !doubts && seconds > 2 {
            run.note(format!("{lengths:?} events"));
            break;
        }
        if healed.elapsed() > CONVERGE_WITHIN {
            run.violated(format!(
                "the logs do not become equal: {lengths:?} events, in doubt: {doubts}"
            ));
            break;
        }
        members.iter().for_each(|member| member.upkeep());
        sleep(Duration::from_secs(1)).await;
    }
    check_events(&members, &known.lock(), is_revoked);
    for member in &members {
        let log = member.log();
        if let Some(Ok(found)) = log.map(|log| log.verify()) {
            member.actor.check(found.problems.is_empty(), || {
                format!("the log is damaged: {:?}", found.problems)
            });
        }
        member.kill(|_| {}).await;
    }
    sleep(Duration::from_secs(200)).await;
    let pipes = net.open_pipes();
    run.check(pipes == 0, || {
        format!("{pipes} directions of connections are left")
    });
    let known = known.lock();
    observer.finish(known.done, known.failed)
}

/// Checks which events arrived where.
fn check_events(members: &[Rc<Member>], known: &Known, is_revoked: impl Fn(Node) -> bool) {
    for member in members {
        if is_revoked(member.node) {
            let mut got = member.events(false).into_iter();
            let secret = got.find(|id| known.secret.contains(id));
            member.actor.check(secret.is_none(), || {
                "it was revoked, and received an event of a member that knew it".into()
            });
            continue;
        }
        let held = member.events(true);
        for author in members.iter().filter(|author| !is_revoked(author.node)) {
            let id = key(author.node).id();
            // Events that no other member had are lost with the disk.
            if known.forgetful.contains(&id) {
                continue;
            }
            let written = known.written.get(&id);
            let lost = written
                .into_iter()
                .flatten()
                .filter(|id| !held.contains(*id))
                .count();
            member.actor.check(lost == 0, || {
                format!(
                    "it lacks {lost} acknowledged events of {}",
                    author.actor.name
                )
            });
        }
    }
}

/// Clock errors, in milliseconds.
const JUMPS: [i64; 6] = [-1_200_000, -90_000, -20_000, 20_000, 90_000, 1_200_000];

/// Lets a fault happen, and ends it.
async fn happen(fault: Fault<Kind>, begin: Instant, all: &[Rc<Member>], mut random: Random) {
    sleep_until(begin + fault.at).await;
    let Some(member) = all.get(fault.node) else {
        return;
    };
    member.actor.note(format!("fault: {:?}", fault.kind));
    let others = (0..MEMBERS).filter(|node| *node != fault.node);
    let ways = Ways {
        net: &member.net,
        node: fault.node,
        others: others.collect(),
    };
    let over = sleep_until(begin + fault.at + fault.lasts);
    match fault.kind {
        Kind::Crash | Kind::TornWrite | Kind::LostWrites => {
            if fault.kind == Kind::LostWrites {
                let (own, mut known) = (key(fault.node).id(), member.known.lock());
                // The node may write events that only this disk held again, in another way.
                known.history.retain(|(author, _), _| *author != own);
                known.forgetful.insert(own);
            }
            let damage = |bytes: &mut Vec<u8>| match fault.kind {
                Kind::TornWrite => {
                    let length = random.between(1, 9_000);
                    bytes.extend((0..length).map(|_| random.draw() as u8));
                }
                // The header of a write-ahead log has 32 bytes, a frame some 4 KiB.
                Kind::LostWrites => {
                    let lost = random.below(200_000) as usize;
                    bytes.truncate(bytes.len().saturating_sub(lost).max(32));
                }
                _ => {}
            };
            member.kill(damage).await;
            over.await;
            if member.log().is_none() {
                member.start();
            }
        }
        Kind::FullDisk => {
            member.fill_disk(1);
            over.await;
            member.fill_disk(-1);
        }
        Kind::Pause => {
            // What the process would do by itself meanwhile is gossip, which no peer gets or answers.
            ways.block(Direction::Both, 1);
            member.pause(1);
            over.await;
            member.pause(-1);
            ways.block(Direction::Both, -1);
        }
        Kind::ClockJump => {
            let jump = random.below(JUMPS.len() as u64) as usize;
            let jump = JUMPS.get(jump).copied().unwrap_or_default();
            member.ahead_ms.fetch_add(jump, Ordering::Relaxed);
            over.await;
            member.ahead_ms.fetch_sub(jump, Ordering::Relaxed);
        }
        Kind::Partition => ways.blocked(Direction::Both, over).await,
        Kind::PartitionIn => ways.blocked(Direction::In, over).await,
        Kind::PartitionOut => ways.blocked(Direction::Out, over).await,
        Kind::SlowLink => ways.slow(over).await,
        Kind::DamagedPacket => ways.damage(),
        Kind::Revoke => {
            // The anchor with this number, or the first one.
            let anchor = all.get(fault.node % 2).unwrap_or(member);
            while begin.elapsed() < fault.at + fault.lasts {
                let node = key(REVOKED).id();
                let head = |log: EventLog| log.heads().authors.get(&node).map(|head| head.seq);
                let last_seq = anchor.log().and_then(head).unwrap_or(0);
                let is_done = |log: EventLog| log.state().is_revoked(&node);
                if anchor.log().is_some_and(is_done)
                    || anchor.write(Body::Revoked { node, last_seq })
                {
                    break;
                }
                sleep(Duration::from_millis(200)).await;
            }
        }
    }
    member.actor.note(format!("over: {:?}", fault.kind));
}
