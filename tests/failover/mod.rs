//! Promise 2: a failing machine costs time, but no token of the answer. Real model, real processes,
//! real signals.
//!
//! The caller is this process, so that a host can be stopped at an exact token. The hosts are
//! processes of their own, except the one that tampers. A sample of the positions always runs; all
//! positions run with
//!
//! ```text
//! cargo test --release -p hearthnet --test program -- failover:: --ignored --nocapture
//! ```

mod engine;
mod layer_inputs;
mod recurrent;
mod silence;

use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::NodeKey;
use hearthnet_files::ModelFile;
use hearthnet_orchestrator::chat::{ChatRequest, Conversation, Done};
use hearthnet_orchestrator::sharded::PumpSettings;
use hearthnet_shard::{RunningHost, ServeConfig, ShardHost};
use hearthnet_testkit::{Tamper, TamperedSource};
use rustix::process::{Signal, WaitId, WaitIdOptions, waitid};

use crate::support::caller::{Caller, Heard, TOKENS, request};
use crate::support::*;

const QUESTION: &str = "Tell me a short story about a lighthouse keeper and a lost whale.";

/// Question of these tests.
fn usual() -> ChatRequest {
    request(QUESTION, 7)
}

/// Caller with the default settings, which computes this many first and last layers itself.
fn caller_with(private: (u32, u32)) -> Caller {
    Caller::with(u32::MAX, PumpSettings::default().health_timeout, private)
}

/// Caller, its question, and the answer if nothing disturbs it.
struct Scene {
    caller: Caller,
    request: ChatRequest,
    undisturbed: Done,
}

impl Scene {
    /// The usual question of a caller with the default settings.
    fn new() -> Self {
        Self::of(caller_with((2, 0)), usual())
    }

    fn of(caller: Caller, request: ChatRequest) -> Self {
        let undisturbed = caller.alone(&request);
        Self {
            caller,
            request,
            undisturbed,
        }
    }

    fn open(&self, hosts: &[String], fallback: bool) -> Conversation {
        self.caller.open(&self.caller.connect(hosts), fallback)
    }

    /// Asks hosts. The answer must equal the undisturbed one. `at` is called as [`Caller::answer`]
    /// describes.
    fn ask(
        &self,
        hosts: &[String],
        fallback: bool,
        what: &str,
        at: impl FnMut(u32, &[String]),
    ) -> (Done, Heard) {
        self.ask_in(&mut self.open(hosts, fallback), what, at)
    }

    /// Asks the question within a conversation.
    fn ask_in(
        &self,
        conversation: &mut Conversation,
        what: &str,
        at: impl FnMut(u32, &[String]),
    ) -> (Done, Heard) {
        let (request, undisturbed) = (&self.request, &self.undisturbed);
        self.caller
            .same_answer(conversation, request, undisturbed, what, at)
    }
}

/// Fault injected into a host at a given token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    /// Of the process that computes; the host itself goes on.
    KillEngine,
    Stop,
}

const RANGES: [&str; 2] = ["0-14", "15-29"];

/// Stops a host; returns when none of its threads runs.
fn stop(host: &Host) {
    host.signal(Signal::STOP);
    let child = WaitId::Pid(pid(host.process.child.id()));
    let stopped = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    waitid(child, stopped).expect("our own process");
}

/// Host processes, addressable by their node id, so that the one in use can be hit.
struct Fleet(Vec<Host>);

impl Fleet {
    /// Starts `each` hosts per half of the model.
    fn new(caller: &Caller, each: usize) -> Self {
        Self::with(caller, each, &[])
    }

    fn with(caller: &Caller, each: usize, settings: &[&str]) -> Self {
        let ranges = RANGES.iter().cycle().take(RANGES.len() * each);
        Self(ranges.map(|range| caller.host(range, settings)).collect())
    }

    fn addresses(&self) -> Vec<String> {
        self.0.iter().map(|host| host.address.clone()).collect()
    }

    fn place(&self, node: &str) -> usize {
        let found = self.0.iter().position(|host| host.address.ends_with(node));
        found.expect("a node of this fleet")
    }

    fn strike(&self, node: &str, fault: Fault) {
        let host = &self.0[self.place(node)];
        match fault {
            Fault::Kill => {
                host.signal(Signal::KILL);
                wait_for_end(host.process.child.id());
            }
            Fault::KillEngine => engine::kill(engine_of(host.process.child.id())),
            Fault::Stop => stop(host),
        }
    }

    /// Restores a hit host for the next round.
    fn mend(&mut self, caller: &Caller, node: &str, fault: Fault) {
        let place = self.place(node);
        match fault {
            // A host replaces only three engines within ten minutes.
            Fault::Kill | Fault::KillEngine => {
                self.0[place] = caller.host(RANGES[place % RANGES.len()], &[]);
            }
            Fault::Stop => self.0[place].signal(Signal::CONT),
        }
    }
}

/// Two hosts and a spare for each. Every host in use gets the fault at each position in turn.
/// Returns the recovery times in ms.
fn matrix(fault: Fault, positions: &[u32]) -> Vec<f64> {
    matrix_of(&Scene::new(), fault, positions)
}

fn matrix_of(scene: &Scene, fault: Fault, positions: &[u32]) -> Vec<f64> {
    assert_eq!(scene.undisturbed.token_ids.len() as u32, TOKENS);
    let mut fleet = Fleet::new(&scene.caller, 2);
    let mut recoveries = Vec::new();
    for victim in 0..RANGES.len() {
        for &position in positions {
            let what = format!("{fault:?} host {victim} at token {position}");
            let mut struck = String::new();
            let (_, heard) = scene.ask(&fleet.addresses(), false, &what, |token, route| {
                if token == position {
                    struck.clone_from(&route[victim]);
                    fleet.strike(&struck, fault);
                }
            });
            // A host hit after the last token is not needed any more. A host hit at the token
            // before may have sent its last step already.
            let failures = heard.degraded.len();
            match position {
                _ if position + 1 < TOKENS => assert_eq!(failures, 1, "{what}"),
                TOKENS => assert_eq!(failures, 0, "{what}"),
                _ => assert!(failures <= 1, "{what}"),
            }
            assert_eq!(heard.recoveries.len(), failures, "{what}");
            recoveries.extend(heard.recoveries.iter().map(|(_, ms)| ms));
            fleet.mend(&scene.caller, &struck, fault);
        }
    }
    recoveries
}

#[test]
fn a_killed_host_costs_no_token() {
    matrix(Fault::Kill, &[0, 1, 17, TOKENS - 1, TOKENS]);
}

#[test]
fn a_killed_engine_costs_no_token() {
    matrix(Fault::KillEngine, &[0, 1, 17, TOKENS - 1, TOKENS]);
}

#[test]
#[ignore = "takes minutes: every host, every token, every fault"]
fn the_whole_fault_matrix_gives_the_same_answer() {
    let positions: Vec<u32> = (0..=TOKENS).collect();
    for fault in [Fault::Kill, Fault::KillEngine, Fault::Stop] {
        let mut times = matrix(fault, &positions);
        times.sort_by(f64::total_cmp);
        let at = |percent: usize| times[(times.len() * percent).div_ceil(100).max(1) - 1];
        println!(
            "{fault:?}: {} positions x {} hosts, all identical; recovery p50 {:.0} ms, p95 {:.0} ms, longest {:.0} ms",
            positions.len(),
            RANGES.len(),
            at(50),
            at(95),
            at(100)
        );
    }
}

#[test]
fn two_failures_in_one_answer_cost_no_token() {
    let scene = Scene::new();
    let fleet = Fleet::new(&scene.caller, 3);
    let mut struck = Vec::new();
    let what = "two failures";
    let (_, heard) = scene.ask(&fleet.addresses(), false, what, |token, route| {
        // Hits the same half twice: its host, and then the replacement.
        if token == 5 || token == 9 {
            let node = match struck.len() {
                0 => route[0].clone(),
                _ => route[route.len() - 1].clone(),
            };
            fleet.strike(&node, Fault::Kill);
            struck.push(node);
        }
    });
    assert_ne!(struck[0], struck[1]);
    assert_eq!(heard.recoveries.len(), 2);
    assert!(!heard.local);
}

#[test]
fn without_a_spare_the_answer_continues_locally() {
    continues_locally(&Scene::new(), &[0, 1, 20, TOKENS - 1]);
}

/// Kills the second of two hosts at some tokens: this machine finishes each answer.
fn continues_locally(scene: &Scene, positions: &[u32]) {
    let mut fleet = Fleet::new(&scene.caller, 1);
    for &position in positions {
        let mut struck = String::new();
        let what = format!("local fallback at token {position}");
        let (_, heard) = scene.ask(&fleet.addresses(), true, &what, |token, route| {
            if token == position {
                struck.clone_from(&route[1]);
                fleet.strike(&struck, Fault::Kill);
            }
        });
        assert!(heard.local, "at token {position}");
        fleet.mend(&scene.caller, &struck, Fault::Kill);
    }
}

#[test]
fn if_the_spare_dies_too_the_answer_continues_locally() {
    let scene = Scene::new();
    let fleet = Fleet::new(&scene.caller, 2);
    let what = "the spare dies as well";
    let (_, heard) = scene.ask(&fleet.addresses(), true, what, |token, route| {
        if token == 8 {
            fleet.strike(&route[0], Fault::Kill);
        }
        if token == 16 {
            fleet.strike(&route[route.len() - 1], Fault::Kill);
        }
    });
    assert!(heard.local);
    assert_eq!(heard.degraded.len(), 2);
}

#[test]
fn a_killed_host_costs_no_token_for_any_number_of_private_layers() {
    let mut undisturbed = None;
    for private in [(0, 0), (1, 1), (5, 0), (0, 3), (26, 3)] {
        let (caller, request) = (caller_with(private), usual());
        let undisturbed = undisturbed.get_or_insert_with(|| caller.alone(&request));
        let scene = Scene {
            undisturbed: undisturbed.clone(),
            caller,
            request,
        };
        // The last host of the route dies in the prompt or in the answer, and a spare takes over.
        // Then the spare dies, and this machine takes over.
        let (mut fleet, mut struck) = (Fleet::new(&scene.caller, 2), Vec::<String>::new());
        for position in [0, 9] {
            for node in struck.drain(..) {
                fleet.mend(&scene.caller, &node, Fault::Kill);
            }
            let what = format!("{private:?} private, killed at token {position}");
            let (done, heard) = scene.ask(&fleet.addresses(), true, &what, |token, route| {
                if token == position || token == 20 {
                    struck.push(route[route.len() - 1].clone());
                    fleet.strike(&route[route.len() - 1], Fault::Kill);
                }
            });
            assert_eq!(heard.degraded.len(), 2, "{what}");
            assert!(heard.local, "{what}");
            let layers: Vec<(u32, u32)> = done.route.iter().map(|hop| hop.layers).collect();
            assert_eq!(layers.first().map(|first| first.0), Some(0), "{what}");
            assert_eq!(layers.last().map(|last| last.1), Some(29), "{what}");
        }
    }
}

#[test]
fn without_any_host_left_the_answer_ends_with_a_clear_error() {
    let scene = Scene::new();
    let fleet = Fleet::new(&scene.caller, 1);
    let mut conversation = scene.open(&fleet.addresses(), false);
    let mut heard = Heard::default();
    let at = |token: u32, route: &[String]| {
        if token == 12 {
            fleet.strike(&route[1], Fault::Kill);
        }
    };
    let result = scene
        .caller
        .answer(&mut conversation, &usual(), &mut heard, at);
    let error = result.expect_err("no host is left");
    assert_eq!(error.code(), "shard_unavailable", "{error}");
    assert_eq!(heard.aborted, ["shard_unavailable"]);
    assert!(!heard.text.is_empty());
    assert!(scene.undisturbed.text.starts_with(&heard.text));
}

/// Hosts that drain until no caller needs them, instead of a short deadline.
const PATIENT: [&str; 2] = [
    "--set",
    "research.distributed_inference.host.drain_seconds=3600",
];

/// Asks a host to stop. Returns when it does not listen any more, which is when it notifies its
/// callers.
fn ask_to_leave(host: &Host) {
    host.signal(Signal::TERM);
    let (address, _) = host.address.split_once('#').expect("an address and a key");
    let address: SocketAddr = address.parse().expect("an address");
    let deadline = Instant::now() + TIMEOUT;
    while TcpStream::connect_timeout(&address, TIMEOUT).is_ok() {
        assert!(Instant::now() < deadline, "it still listens");
        std::thread::yield_now();
    }
}

/// Checks that a draining host exits with success, long before its deadline.
fn has_left(mut host: Host) {
    wait_for_end(host.process.child.id());
    let status = host.process.child.wait().expect("our own process");
    assert_eq!(status.code(), Some(0));
}

#[test]
fn a_draining_host_is_replaced_during_an_answer_without_a_failure() {
    let scene = Scene::new();
    for victims in [&[0][..], &[1], &[0, 1]] {
        let what = format!("hosts {victims:?} leave");
        let mut fleet = Fleet::with(&scene.caller, 2, &PATIENT);
        let mut asked = Vec::new();
        let (_, heard) = scene.ask(&fleet.addresses(), false, &what, |token, route| {
            if token == 9 {
                for &victim in victims {
                    ask_to_leave(&fleet.0[fleet.place(&route[victim])]);
                    asked.push(route[victim].clone());
                }
            }
        });
        assert_eq!(heard.degraded, [""; 0], "{what}");
        let codes = heard.recoveries.iter().map(|(code, _)| code);
        assert_eq!(
            codes.collect::<Vec<_>>(),
            vec!["leaving"; victims.len()],
            "{what}"
        );
        for node in asked {
            has_left(fleet.0.remove(fleet.place(&node)));
        }
    }
}

#[test]
fn a_draining_host_without_a_spare_finishes_the_answer() {
    let scene = Scene::new();
    let mut fleet = Fleet::with(&scene.caller, 1, &PATIENT);
    let what = "no other host has the layers";
    let (_, heard) = scene.ask(&fleet.addresses(), false, what, |token, _| {
        if token == 9 {
            ask_to_leave(&fleet.0[1]);
        }
    });
    assert!(heard.degraded.is_empty() && heard.recoveries.is_empty());
    has_left(fleet.0.remove(1));
}

#[test]
fn an_idle_conversation_does_not_delay_a_draining_host() {
    let scene = Scene::new();
    let mut fleet = Fleet::with(&scene.caller, 2, &PATIENT);
    let mut conversation = scene.open(&fleet.addresses(), false);
    let mut turn = || {
        let mut route = Vec::new();
        let (_, heard) = scene.ask_in(&mut conversation, "a turn", |_, now| {
            route = now.to_vec();
        });
        assert_eq!(heard.degraded, [""; 0]);
        (heard.recoveries, route)
    };
    let (_, route) = turn();
    let host = fleet.0.remove(fleet.place(&route[0]));
    host.signal(Signal::TERM);
    has_left(host);
    let (moves, _) = turn();
    assert_eq!(moves.len(), 1);
}

#[test]
fn the_replacement_of_a_drained_host_may_die() {
    let scene = Scene::new();
    let fleet = Fleet::with(&scene.caller, 3, &PATIENT);
    let strike = |token: u32, route: &[String]| match token {
        5 => ask_to_leave(&fleet.0[fleet.place(&route[1])]),
        // The chat has moved by now. If not, the host that runs the layers dies.
        20 => fleet.strike(&route[route.len() - 1], Fault::Kill),
        _ => {}
    };
    let what = "one leaves, one dies";
    let (_, heard) = scene.ask(&fleet.addresses(), false, what, strike);
    assert_eq!(heard.degraded.len(), 1);
}

/// Ways in which a host tampers with its answers.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Honest rows, delayed by this time per step.
    Slow(Duration),
    /// A NaN at one position.
    Nan,
    /// The received rows, unchanged, at one position.
    Input,
}

fn liar(caller: &Caller, lie: Lie, at: u32, layers: Range<u32>) -> (RunningHost, String) {
    let file = Arc::new(ModelFile::open(model().as_ref()).expect("the real model"));
    let mut config = ServeConfig::new("127.0.0.1:0");
    config.admitted = vec![caller.key.id()];
    let key = NodeKey::generate().expect("a key");
    let tamper: Tamper = Box::new(move |passing| {
        if let Lie::Slow(pause) = lie {
            // Occupies the compute thread, as slow work does.
            std::thread::sleep(pause);
        }
        if passing.spans.iter().any(|span| span.position == at) {
            match lie {
                Lie::Nan => passing.rows[0] = f32::NAN,
                Lie::Input => passing.rows.copy_from_slice(passing.sent),
                Lie::Slow(_) => {}
            }
        }
    });
    let source = TamperedSource::new(&file, layers, tamper);
    let served = source.served(&caller.wire.model_id, caller.wire.weights);
    let mut progress = |_| {};
    let start = ShardHost::start_on(config, &key, served, source, &mut progress);
    let host = caller.runtime.block_on(start).expect("a host");
    let address = format!("{}#{}", host.local_addr(), key.id());
    (host, address)
}

#[test]
fn a_host_that_tampers_once_is_replaced_and_costs_no_token() {
    let scene = Scene::new();
    let prompt = scene.undisturbed.usage.prompt_tokens;
    let honest = ["0-14", "15-19", "20-29"].map(|layers| scene.caller.host(layers, &[]));
    let mut all: Vec<String> = honest.iter().map(|host| host.address.clone()).collect();
    for (lie, token, code) in [
        (Lie::Nan, 1, "tensor_nonfinite"),
        (Lie::Nan, 13, "tensor_nonfinite"),
        (Lie::Nan, 40, "tensor_nonfinite"),
        (Lie::Input, 1, "tensor_band"),
        (Lie::Input, 13, "tensor_band"),
    ] {
        let (_host, lies) = liar(&scene.caller, lie, prompt + token - 1, 15..30);
        // The tampering host is chosen: it reaches the end of the model alone, the others need two
        // hops.
        all.truncate(honest.len());
        all.push(lies);
        let what = format!("{lie:?} at token {token}");
        let (done, heard) = scene.ask(&all, false, &what, |_, _| {});
        assert_eq!(heard.degraded, [code]);
        let hosts = done.route.iter().filter(|hop| hop.host.is_some());
        assert_eq!(hosts.count(), 3, "two hosts took over for one");
    }
}
