//! The scene of answers: three hosts, two callers.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, sleep_until};

use crate::caller::{Caller, key};
use crate::faults::{Fault, Scene, Schedule};
use crate::host::Host;
use crate::lies::Lies;
use crate::model::{LAYERS, Model};
use crate::net::{Direction, Net, Node, Ways};
use crate::observer::{Observer, Report};
use crate::random::Random;
use crate::run::in_virtual_time;

/// Number of hosts of a run.
const HOSTS: usize = 3;

/// A fault of a host, or of its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::VariantArray)]
pub enum Kind {
    /// The process dies. Its machine resets the connections, and starts it again later.
    Crash,
    /// The machine loses its power: its peers hear nothing until it is back.
    PowerLoss,
    /// The process is asked to stop, and starts again later.
    Leave,
    /// The process stands still, as when a laptop sleeps.
    Pause,
    /// No packets in either direction.
    Partition,
    /// No packets to the host.
    PartitionIn,
    /// No packets from the host.
    PartitionOut,
    /// Packets take 40 times as long.
    SlowLink,
    /// Batches take 50 times as long.
    SlowHost,
    /// A bit of the host's next packets changes.
    DamagedPacket,
    /// The next rows of the host are wrong, as every caller can see.
    SpoiledRows,
    /// From now on, all rows that the host returns are a little wrong, which only an audit can find.
    Lies,
    /// The callers learn that the host is no member any more, and do not connect until the end.
    Revoked,
    /// The process dies in the middle of a write of its model file. It tries to start with that file,
    /// and starts again later, when it has fetched the file again.
    TornWrite,
    /// The process dies, and starts again on a disk without room for the record of its model file.
    FullDisk,
}

/// The scene.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answers {}

impl Scene for Answers {
    type Kind = Kind;

    const OPTION: &'static str = "";
    const NODES: usize = HOSTS;
}

/// Callers have the numbers behind the hosts.
const CALLERS: [Node; 2] = [HOSTS, HOSTS + 1];
/// Bytes that a session may still write when its caller knows that the host is revoked: the end of the
/// session. A row of a step has 128 bytes.
const GOODBYE_BYTES: usize = 100;
/// Time in which callers begin new calls.
const CALLING: Duration = Duration::from_millis(4_500);

/// Runs a schedule.
pub fn run(model: &Arc<Model>, schedule: &Schedule<Answers>) -> Report {
    in_virtual_time(scene(model, schedule))
}

/// First and last layers of the hosts. The seed chooses the line.
const LAYOUTS: [[(u32, u32); HOSTS]; 4] = [
    // A spare for each of two hosts.
    [(0, 1), (2, LAYERS - 1), (0, LAYERS - 1)],
    // Ranges that overlap.
    [(0, 2), (1, LAYERS - 1), (0, LAYERS - 1)],
    // Each layer but the first has two hosts.
    [(0, 1), (2, LAYERS - 1), (1, LAYERS - 1)],
    // Three equal hosts.
    [(0, LAYERS - 1), (0, LAYERS - 1), (0, LAYERS - 1)],
];

fn layers(seed: u64, host: Node) -> (u32, u32) {
    let layout = LAYOUTS.get((seed % LAYOUTS.len() as u64) as usize);
    let layers = layout.and_then(|layout| layout.get(host));
    layers.copied().unwrap_or((0, LAYERS - 1))
}

async fn scene(model: &Arc<Model>, schedule: &Schedule<Answers>) -> Report {
    let begin = Instant::now();
    let tasks_before = Handle::current().metrics().num_alive_tasks();
    let observer = Observer::begin();
    let run = observer.actor("run");
    let net = Net::new(schedule.seed);
    let lies = Lies::default();
    let ids: Vec<_> = CALLERS.iter().map(|caller| key(*caller).id()).collect();
    let hosts: Vec<Rc<Host>> = (0..HOSTS)
        .map(|node| {
            Rc::new(Host::new(
                node,
                layers(schedule.seed, node),
                &ids,
                model,
                &net,
                &observer,
                &lies,
            ))
        })
        .collect();
    for host in &hosts {
        host.repair();
        host.start().await;
    }
    let addresses: Vec<_> = hosts
        .iter()
        .map(|host| (host.node, host.addr.clone()))
        .collect();
    let new = |node: &Node| {
        let (net, observer, seed) = (&net, &observer, schedule.seed);
        Caller::new(*node, &addresses, model, net, observer, &lies, seed)
    };
    let callers: Vec<Rc<Caller>> = CALLERS.iter().map(new).map(Rc::new).collect();
    sleep(Duration::from_millis(100)).await;

    let faults_end = begin + schedule.end();
    let faulty: Vec<_> = schedule
        .faults
        .iter()
        .zip(0..)
        .map(|(fault, number)| {
            let random = Random::new(schedule.seed, 500 + number);
            let (net, callers) = (net.clone(), callers.clone());
            let (fault, host) = (*fault, hosts.get(fault.node).cloned());
            spawn_local(async move {
                if let Some(host) = host {
                    happen(fault, begin, &host, &callers, &net, random).await;
                }
            })
        })
        .collect();
    let calling: Vec<_> = CALLERS
        .iter()
        .zip(&callers)
        .map(|(node, caller)| {
            let caller = Rc::clone(caller);
            let mut random = Random::new(schedule.seed, 77 + *node as u64);
            spawn_local(async move {
                let mut answered = Vec::new();
                while begin.elapsed() < CALLING {
                    answered.push(caller.chat(&mut random, faults_end).await);
                    sleep(Duration::from_millis(random.between(1, 200))).await;
                }
                // Once more, when all is well again.
                sleep_until(faults_end + Duration::from_secs(2)).await;
                answered.push(caller.chat(&mut random, faults_end).await);
                answered
            })
        })
        .collect();

    let mut answered = Vec::new();
    for calls in calling {
        match calls.await {
            Ok(calls) => answered.extend(calls),
            Err(error) => run.violated(format!("a caller's task failed: {error}")),
        }
    }
    for fault in faulty {
        if let Err(error) = fault.await {
            run.violated(format!("a fault's task failed: {error}"));
        }
    }
    for caller in &callers {
        caller.finish_audits().await;
    }
    let sent = net.most_counted();
    run.note(format!("at most {sent} bytes to a revoked host"));
    run.check(sent <= GOODBYE_BYTES, || {
        format!("a session sends {sent} bytes to a host that its caller knows to be revoked")
    });
    for host in &hosts {
        host.actor
            .check(host.is_running(), || "it did not start again".into());
        host.check_returned().await;
    }
    drop(callers);
    // Sessions that a fault has cut off end with their keep-alive.
    for _ in 0..100 {
        if hosts.iter().all(|host| host.sessions() == 0) && net.open_pipes() == 0 {
            break;
        }
        sleep(Duration::from_secs(1)).await;
    }
    for host in &hosts {
        let sessions = host.sessions();
        host.actor
            .check(sessions == 0, || format!("{sessions} sessions are left"));
        host.kill();
    }
    drop(hosts);
    sleep(Duration::from_secs(10)).await;
    let pipes = net.open_pipes();
    run.check(pipes == 0, || {
        format!("{pipes} directions of connections are left")
    });
    let tasks = Handle::current().metrics().num_alive_tasks();
    run.check(tasks <= tasks_before, || {
        format!("{} tasks are left", tasks - tasks_before)
    });
    let count = |state: bool| answered.iter().filter(|call| **call == state).count() as u32;
    observer.finish(count(true), count(false))
}

/// Lets a fault happen, and ends it.
async fn happen(
    fault: Fault<Kind>,
    begin: Instant,
    host: &Host,
    callers: &[Rc<Caller>],
    net: &Net,
    mut random: Random,
) {
    sleep_until(begin + fault.at).await;
    host.actor.note(format!("fault: {:?}", fault.kind));
    let ways = Ways {
        net,
        node: host.node,
        others: CALLERS.to_vec(),
    };
    let over = sleep_until(begin + fault.at + fault.lasts);
    match fault.kind {
        Kind::Crash => {
            host.kill();
            over.await;
        }
        Kind::PowerLoss => {
            ways.block(Direction::Both, 1);
            host.kill();
            over.await;
            ways.block(Direction::Both, -1);
        }
        Kind::Leave => {
            host.leave(fault.lasts / 2).await;
            over.await;
        }
        Kind::Pause => {
            ways.block(Direction::Both, 1);
            host.pause(over.deadline());
            over.await;
            ways.block(Direction::Both, -1);
        }
        Kind::Partition => ways.blocked(Direction::Both, over).await,
        Kind::PartitionIn => ways.blocked(Direction::In, over).await,
        Kind::PartitionOut => ways.blocked(Direction::Out, over).await,
        Kind::SlowLink => ways.slow(over).await,
        Kind::SlowHost => {
            host.set_pace(50);
            over.await;
            host.set_pace(1);
        }
        Kind::DamagedPacket => ways.damage(),
        Kind::SpoiledRows => host.spoil(),
        Kind::Lies => host.lie(),
        Kind::TornWrite | Kind::FullDisk => {
            match fault.kind {
                Kind::TornWrite => host.tear(&mut random),
                _ => host.fill_disk(),
            }
            sleep(fault.lasts / 2).await;
            if !host.is_running() {
                host.start().await;
            }
            over.await;
            host.repair();
        }
        Kind::Revoked => {
            let revoke = |is_revoked| {
                let callers = callers.iter();
                callers.for_each(|caller| caller.revoke(host.node, is_revoked));
            };
            revoke(true);
            over.await;
            revoke(false);
        }
    }
    host.actor.note(format!("over: {:?}", fault.kind));
    // Several faults may have stopped it: the last one that ends starts it.
    let stops = [
        Kind::Crash,
        Kind::PowerLoss,
        Kind::Leave,
        Kind::TornWrite,
        Kind::FullDisk,
    ];
    if stops.contains(&fault.kind) && !host.is_running() {
        host.start().await;
    }
}
