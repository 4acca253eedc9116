use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};

use hearthnet_transport::{CloseCode, Frame, NodeId, PathRule};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::super::client::{CallStream, Client};
use super::super::descriptor::CallLimits;
use super::super::frame::{BUS_PATH, MAX_MESSAGE_BYTES, WINDOW_FRAMES};
use super::super::frame_sink::STALL;
use super::super::params::{Kind, Params};
use super::super::tests::{connect, key};
use super::*;
use crate::testing::id;

const BUS_DESCRIBE: &str = "bus.describe@1.0";
const COMMUNITY_JOIN: &str = "community.join@1.0";
const NOW: u64 = 1_750_000_000_000;

fn cap(text: &str) -> Capability {
    text.parse().unwrap()
}

/// Key 1 is the node itself and an anchor; 2 is trusted, 3 a member, others are strangers.
struct TestCommunity {
    research: Mutex<Research>,
}

impl Authority for TestCommunity {
    fn level(&self, node: &NodeId) -> Option<Level> {
        let mut levels = [(1, Level::Anchor), (2, Level::Trusted), (3, Level::Member)].into_iter();
        let found = levels.find(|(seed, _)| id(*seed) == *node);
        found.map(|(_, level)| level)
    }

    fn research(&self) -> Research {
        *self.research.lock()
    }
}

/// Number of running handlers, and of all that were started.
#[derive(Default)]
struct Count {
    running: AtomicUsize,
    begun: AtomicUsize,
    changed: Notify,
}

impl Count {
    async fn until(&self, running: usize, begun: usize) {
        let reached = async {
            loop {
                let mut changed = pin!(self.changed.notified());
                changed.as_mut().enable();
                let begins = self.begun.load(Ordering::SeqCst);
                if (self.running.load(Ordering::SeqCst), begins) == (running, begun) {
                    return;
                }
                changed.await;
            }
        };
        let reached = timeout(Duration::from_secs(10), reached).await;
        reached.expect("within 10 s");
    }
}

struct Running(Arc<Count>);

impl Running {
    fn new(count: &Arc<Count>) -> Self {
        count.running.fetch_add(1, Ordering::SeqCst);
        count.begun.fetch_add(1, Ordering::SeqCst);
        count.changed.notify_waiters();
        Self(Arc::clone(count))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
        self.0.changed.notify_waiters();
    }
}

/// Sends as many events as asked, then behaves according to its kind.
struct Ticker {
    count: Arc<Count>,
    then: Then,
}

#[derive(Clone, Copy)]
enum Then {
    End,
    Wait,
    Panic,
}

impl Handler for Ticker {
    fn call(&self, ctx: CallContext, params: Value, out: FrameSink) -> Answering<'_> {
        Box::pin(async move {
            let _running = Running::new(&self.count);
            for n in 0..params["ticks"].as_u64().unwrap_or(0) {
                out.send("tick", &json!(n)).await?;
            }
            match self.then {
                Then::End => Ok(json!({"caller": ctx.caller, "local": ctx.is_local})),
                Then::Wait => std::future::pending().await,
                Then::Panic => panic!("a defect of a handler"),
            }
        })
    }
}

/// Waits on its own thread until it is cancelled.
struct Threaded(Arc<Count>);

impl Handler for Threaded {
    fn call(&self, ctx: CallContext, _: Value, out: FrameSink) -> Answering<'_> {
        let (count, runtime) = (Arc::clone(&self.0), tokio::runtime::Handle::current());
        Box::pin(async move {
            let work = tokio::task::spawn_blocking(move || {
                let (_running, _slot) = (Running::new(&count), ctx.slot.clone());
                while runtime.block_on(out.send("tick", &json!(0))).is_ok() {}
                assert!(ctx.cancel.is_cancelled());
            });
            let _ = work.await;
            Ok(Value::Null)
        })
    }
}

struct World {
    server: Arc<CallServer>,
    test_community: Arc<TestCommunity>,
    count: Arc<Count>,
}

fn world() -> World {
    world_with(Rate {
        per_second: 1000,
        burst: 1000,
    })
}

fn world_with(rate: Rate) -> World {
    let registry = Arc::new(Registry::new());
    let count = Arc::new(Count::default());
    let add = |name: &str, level: Option<Level>, then| {
        let mut descriptor = CapabilityDescriptor::new(cap(name), "A test.", level);
        descriptor.params = Params::none().optional("ticks", Kind::Integer { min: 0, max: 1000 });
        descriptor.limits = CallLimits {
            concurrent: 3,
            concurrent_per_caller: 2,
            seconds: 60,
        };
        if name.starts_with("slow") {
            descriptor.limits.seconds = 1;
        }
        let count = Arc::clone(&count);
        registry
            .register(descriptor, Arc::new(Ticker { count, then }))
            .unwrap();
    };
    let member = Some(Level::Member);
    add("tick@1.1", member, Then::End);
    add("wait@1.0", member, Then::Wait);
    add("slow@1.0", member, Then::Wait);
    add("panic@1.0", member, Then::Panic);
    add("trusted@1.0", Some(Level::Trusted), Then::End);
    add("experimental.tick@1.0", member, Then::End);
    add(COMMUNITY_JOIN, None, Then::End);
    let mut threaded = CapabilityDescriptor::new(cap("thread@1.0"), "A test.", member);
    threaded.limits.concurrent_per_caller = 1;
    registry
        .register(threaded, Arc::new(Threaded(Arc::clone(&count))))
        .unwrap();
    let test_community = Arc::new(TestCommunity {
        research: Mutex::new(Research::On),
    });
    let authority = Arc::clone(&test_community) as Arc<dyn Authority>;
    let mut server = CallServer::new(id(1), registry, authority);
    server.gate.get_mut().budgets = Budgets::new(rate, rate, 0);
    World {
        server: Arc::new(server),
        test_community,
        count,
    }
}

impl World {
    /// A wire to the server as from an app on its machine, and the task that serves it.
    fn raw(&self) -> (Wire, tokio::task::JoinHandle<()>) {
        let ((ours, theirs), server) = (Wire::pair(), Arc::clone(&self.server));
        let task = tokio::spawn(async move { server.serve_wire(theirs, Origin::Local).await });
        (ours, task)
    }

    fn connect(&self, seed: u8) -> (Client, tokio::task::JoinHandle<()>) {
        connect(&self.server, seed)
    }

    /// A socket of key 3 to the server.
    async fn socket(&self) -> PeerSocket {
        let rule = PathRule::new(BUS_PATH, MAX_MESSAGE_BYTES).with_text();
        let (ours, theirs) = PeerSocket::pair([id(3), id(1)], &rule).await;
        let server = Arc::clone(&self.server);
        tokio::spawn(async move { server.serve(theirs).await });
        ours
    }

    fn request(&self, seed: u8, capability: &str, params: &str, number: u8) -> Request {
        let (capability, number) = (cap(capability), [number; 16]);
        let envelope = Envelope::new(id(seed), id(1), capability, params, number, NOW);
        Request::Signed {
            envelope: URL_SAFE_NO_PAD.encode(envelope.sign(&key(seed)).unwrap()),
            params: params.into(),
        }
    }

    /// Admits a call, with the envelope of this number.
    fn admit(&self, seed: u8, name: &str, params: &str, number: u8) -> Result<Admitted, CallError> {
        let request = self.request(seed, name, params, number);
        self.server.admit(Origin::Peer(id(seed)), request, NOW)
    }

    fn refusal(&self, seed: u8, capability: &str, params: &str) -> String {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let id = 100 + NEXT.fetch_add(1, Ordering::Relaxed) as u8;
        let error = self.admit(seed, capability, params, id).unwrap_err();
        format!("{}: {}", error.code(), error.message())
    }
}

fn call(client: &Client, capability: &str, ticks: u64) -> CallStream {
    client
        .call(&cap(capability), &json!({ "ticks": ticks }))
        .unwrap()
}

/// A call without a signature.
fn plain() -> Request {
    Request::Plain {
        capability: cap("tick@1.0"),
        params: json!({}),
    }
}

async fn code(stream: CallStream) -> Code {
    let result = timeout(Duration::from_secs(20), stream.result()).await;
    result.expect("an end").unwrap_err().code().clone()
}

#[tokio::test]
async fn a_call_streams_its_events_in_order_and_ends() {
    let world = world();
    let (client, _task) = world.connect(3);
    let mut stream = call(&client, "tick@1.0", 500);
    let mut heard = 0;
    while let Some(event) = stream.next().await.unwrap() {
        assert_eq!((event.name.as_str(), event.data), ("tick", json!(heard)));
        heard += 1;
    }
    assert_eq!(heard, 500);
    let end = stream.result().await.unwrap();
    assert_eq!(end, json!({"caller": id(3), "local": false}));
}

#[tokio::test]
async fn calls_go_over_the_transports_socket_as_well() {
    let world = world();
    let client = Client::new(world.socket().await, key(3));
    let end = call(&client, "tick@1.0", 200).result().await.unwrap();
    assert_eq!(end["caller"], json!(id(3)));
}

#[tokio::test]
async fn dropping_a_stream_stops_its_handler_and_frees_its_place() {
    let world = world();
    let (client, _task) = world.connect(3);
    let streams = [call(&client, "wait@1.0", 0), call(&client, "wait@1.0", 0)];
    world.count.until(2, 2).await;
    assert_eq!(code(call(&client, "wait@1.0", 0)).await, Code::BUSY);
    drop(streams);
    world.count.until(0, 2).await;
    let _again = call(&client, "wait@1.0", 0);
    world.count.until(1, 3).await;
}

#[tokio::test]
async fn a_lost_connection_stops_all_its_handlers() {
    let world = world();
    let (client, task) = world.connect(3);
    let stream = call(&client, "wait@1.0", 0);
    world.count.until(1, 1).await;
    task.abort();
    world.count.until(0, 1).await;
    assert_eq!(code(stream).await, Code::UNREACHABLE);
    assert!(client.is_lost());
    let refused = client.call(&cap("tick@1.0"), &json!({})).unwrap_err();
    assert_eq!(refused.code(), &Code::UNREACHABLE);
    // The same if the caller disconnects.
    let (client, task) = world.connect(3);
    let stream = call(&client, "wait@1.0", 0);
    world.count.until(1, 2).await;
    drop((client, stream));
    world.count.until(0, 2).await;
    task.await.unwrap();
}

#[tokio::test]
async fn a_thread_at_work_hears_of_the_cancel_and_keeps_its_place_until_it_stops() {
    let world = world();
    let (client, _task) = world.connect(3);
    let mut stream = client.call(&cap("thread@1.0"), &json!({})).unwrap();
    assert!(stream.next().await.unwrap().is_some());
    assert_eq!(world.count.running.load(Ordering::SeqCst), 1);
    drop(stream);
    world.count.until(0, 1).await;
    // The slot is dropped with the thread's other variables.
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let mut again = client.call(&cap("thread@1.0"), &json!({})).unwrap();
        match again.next().await {
            Ok(_) => break,
            Err(error) => assert_eq!(error.code(), &Code::BUSY),
        }
        assert!(Instant::now() < deadline);
    }
}

#[tokio::test]
async fn a_slow_caller_delays_no_other() {
    let world = world();
    let (client, _task) = world.connect(3);
    let slow = call(&client, "tick@1.0", 1000);
    world.count.until(1, 1).await;
    let mut quick = call(&client, "tick@1.0", WINDOW_FRAMES * 3);
    let mut heard = 0;
    while quick.next().await.unwrap().is_some() {
        heard += 1;
    }
    assert_eq!(heard, WINDOW_FRAMES * 3);
    assert_eq!(
        world.count.running.load(Ordering::SeqCst),
        1,
        "the slow one waits"
    );
    assert!(slow.result().await.is_ok());
}

#[tokio::test]
async fn a_handler_that_panics_or_takes_too_long_ends_its_call_alone() {
    let world = world();
    let (client, _task) = world.connect(3);
    let waits = call(&client, "wait@1.0", 0);
    assert_eq!(code(call(&client, "panic@1.0", 3)).await, Code::INTERNAL);
    assert_eq!(code(call(&client, "slow@1.0", 3)).await, Code::TIMEOUT);
    world.count.until(1, 3).await;
    drop(waits);
    assert!(call(&client, "tick@1.0", 3).result().await.is_ok());
}

#[tokio::test]
async fn a_caller_that_breaks_a_rule_loses_the_connection_and_its_calls() {
    let world = world();
    let (mut ours, task) = world.raw();
    let data = r#"{"capability":"wait@1.0","params":{}}"#;
    let open = format!(r#"{{"call":1,"seq":1,"event":"call","data":{data}}}"#);
    ours.outgoing.send(open.clone()).await.unwrap();
    world.count.until(1, 1).await;
    ours.outgoing.send(open).await.unwrap();
    task.await.unwrap();
    world.count.until(0, 1).await;
    assert!(matches!(ours.incoming.next().await, Err(Ended::Closed)));
}

#[tokio::test]
async fn a_binary_message_between_nodes_is_frame_unknown() {
    let world = world();
    let mut ours = world.socket().await;
    let binary = Frame::Binary(vec![1, 2, 3].into());
    ours.send(binary).await.unwrap();
    let closed = ours.recv().await.unwrap_err();
    assert_eq!(
        (closed.code, closed.by_us),
        (CloseCode::FrameUnknown, false)
    );
}

#[test]
fn strangers_may_join_and_learn_nothing_else() {
    let world = world();
    assert!(world.admit(9, COMMUNITY_JOIN, "{}", 1).is_ok());
    let no_member = format!("unauthorized: {} is not a member of this community", id(9));
    assert_eq!(world.refusal(9, "no.such@1.0", "{}"), no_member);
    assert_eq!(world.refusal(9, "wait@1.0", "{}"), no_member);
}

#[test]
fn a_level_too_low_is_refused_before_anything_runs() {
    let world = world();
    assert!(world.admit(2, "trusted@1.0", "{}", 1).is_ok());
    assert!(world.admit(1, "trusted@1.0", "{}", 1).is_ok());
    let refused = world.refusal(3, "trusted@1.0", "{}");
    let needs = "unauthorized: trusted@1.0 needs the level trusted, ";
    assert!(
        refused.starts_with(needs) && refused.ends_with(" is member"),
        "{refused}"
    );
    assert_eq!(world.count.begun.load(Ordering::SeqCst), 0);
}

#[test]
fn experiments_are_refused_with_the_setting_that_is_off() {
    let world = world();
    assert!(world.admit(3, "experimental.tick@1.0", "{}", 1).is_ok());
    *world.test_community.research.lock() = Research::OffHere;
    let refused = world.refusal(3, "experimental.tick@1.0", "{}");
    assert!(refused.starts_with("experimental_disabled: "), "{refused}");
    assert!(refused.contains("policy.research.enable"), "{refused}");
    *world.test_community.research.lock() = Research::OffInCommunity;
    let refused = world.refusal(3, "experimental.tick@1.0", "{}");
    assert!(
        refused.contains("community: its policy `research`"),
        "{refused}"
    );
    assert!(world.admit(3, "tick@1.0", "{}", 2).is_ok());
}

#[test]
fn unknown_or_forbidden_calls_are_refused_with_their_reason() {
    let world = world();
    for case in [
        "tack@1.0 {} -> not_found: this node has no capability tack",
        "tick@1.2 {} -> version_unsupported: this node has tick in version 1.1",
        "tick@2.0 {} -> version_unsupported: this node has tick in version 1.1",
        "tick@1.0 { -> bad_request: params: is not JSON",
        "tick@1.0 [] -> bad_request: params: must be an object",
        r#"tick@1.0 {"ticks":1001} -> bad_request: ticks: must be a whole number from 0 to 1000"#,
        r#"tick@1.0 {"tocks":1} -> bad_request: tocks: is not a parameter of this capability"#,
    ] {
        let (call, says) = case.split_once(" -> ").unwrap();
        let (capability, params) = call.split_once(' ').unwrap();
        assert_eq!(world.refusal(3, capability, params), says);
    }
}

#[test]
fn an_envelope_is_good_for_one_call_of_one_node() {
    let world = world();
    let peer = Origin::Peer(id(3));
    let code = |origin, request, now| {
        let refused = world.server.admit(origin, request, now).unwrap_err();
        refused.code().clone()
    };
    let request = world.request(3, "tick@1.0", "{}", 1);
    // Another node replays the request.
    let stolen = code(Origin::Peer(id(2)), request.clone(), NOW);
    assert_eq!(stolen, Code::UNAUTHORIZED);
    world.server.admit(peer, request.clone(), NOW).unwrap();
    assert_eq!(code(peer, request.clone(), NOW), Code::CALL_REPLAYED);
    let later = code(peer, request.clone(), NOW + 120_000);
    assert_eq!(later, Code::CALL_REPLAYED);
    assert_eq!(code(peer, request, NOW + 120_001), Code::CALL_EXPIRED);
    let garbage = |envelope: &str| Request::Signed {
        envelope: envelope.into(),
        params: "{}".into(),
    };
    for envelope in ["", "!", "AAAA", &"A".repeat(3000)] {
        let refused = code(peer, garbage(envelope), NOW);
        assert_eq!(refused, Code::BAD_REQUEST, "{envelope}");
    }
}

#[test]
fn only_this_machine_calls_without_a_signature() {
    let world = world();
    let admitted = world.server.admit(Origin::Local, plain(), NOW).unwrap();
    let ctx = &admitted.ctx;
    assert_eq!((ctx.caller, ctx.is_local), (id(1), true));
    let peer = Origin::Peer(id(3));
    let refused = world.server.admit(peer, plain(), NOW).unwrap_err();
    assert_eq!(refused.code(), &Code::BAD_REQUEST);
    let signed = world.request(1, "tick@1.0", "{}", 1);
    let refused = world.server.admit(Origin::Local, signed, NOW).unwrap_err();
    assert_eq!(refused.code(), &Code::BAD_REQUEST);
}

#[test]
fn peers_use_no_slots_of_local_apps() {
    let world = world();
    let peers = [(2, 1), (2, 2), (3, 3)];
    let held = peers.map(|(seed, id)| world.admit(seed, "tick@1.0", "{}", id).unwrap());
    assert!(world.refusal(3, "tick@1.0", "{}").starts_with("busy: "));
    world.server.admit(Origin::Local, plain(), NOW).unwrap();
    drop(held);
}

#[test]
fn a_peer_that_calls_too_often_is_told_when_to_come_back() {
    let world = world_with(Rate {
        per_second: 1,
        burst: 2,
    });
    for id in 0..2 {
        world.admit(3, "tick@1.0", "{}", id).unwrap();
    }
    let refused = world.admit(3, "tick@1.0", "{}", 3).unwrap_err();
    assert_eq!(refused.code(), &Code::RATE_LIMITED);
    assert_eq!(refused.hint(), "try again in 1000 ms");
    world.admit(2, "tick@1.0", "{}", 1).unwrap();
}

#[tokio::test]
async fn a_node_lists_what_it_can_be_asked() {
    let world = world();
    let (client, _task) = world.connect(3);
    let stream = client.call(&cap(BUS_DESCRIBE), &json!({})).unwrap();
    let listed = &stream.result().await.unwrap()["capabilities"];
    assert_eq!(*listed, json!(world.server.registry().descriptors()));
    for (name, level) in [("tick@1.1", "member"), (COMMUNITY_JOIN, "anyone")] {
        let mut all = listed.as_array().unwrap().iter();
        let found = all.find(|one| one["capability"] == name).unwrap();
        assert_eq!(found["trust"], level);
    }
}

#[tokio::test(start_paused = true)]
async fn a_strangers_connection_is_limited_in_time() {
    let world = world();
    let (client, task) = world.connect(9);
    assert!(call(&client, COMMUNITY_JOIN, 0).result().await.is_ok());
    let began = Instant::now();
    task.await.unwrap();
    assert_eq!(began.elapsed().as_secs(), STRANGER_STAYS.as_secs());
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_never_takes_events_is_given_up() {
    let world = world();
    let (client, _task) = world.connect(3);
    let stream = call(&client, "tick@1.0", 1000);
    world.count.until(1, 1).await;
    tokio::time::sleep(STALL + Duration::from_secs(1)).await;
    world.count.until(0, 1).await;
    assert_eq!(code(stream).await, Code::TIMEOUT);
}

#[tokio::test]
async fn an_unread_message_does_not_block_cleanup() {
    let world = world();
    let (mut ours, task) = world.raw();
    let data = r#"{"capability":"tick@1.0","params":{"ticks":1000}}"#;
    let open = format!(r#"{{"call":1,"seq":1,"event":"call","data":{data}}}"#);
    ours.outgoing.send(open).await.unwrap();
    world.count.until(1, 1).await;
    // The reader is gone while a message waits to be written.
    drop(ours);
    task.await.unwrap();
    world.count.until(0, 1).await;
}
