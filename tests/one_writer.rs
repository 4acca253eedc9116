//! A community's log is written by one process: by the home's daemon if one runs, otherwise by the
//! command itself. Real processes; where a daemon must misbehave, the test plays the daemon.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Output};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use hearthnet_bus::calls::{
    CallContext, CallError, CallServer, CapabilityDescriptor, FrameSink, Handler, Kind, LocalApi,
    OneLevel, Params, Registry,
};
use hearthnet_bus::discovery::{CommunityTag, DiscoverySettings};
use hearthnet_bus::log::{EventLog, Level};
use hearthnet_bus::node::{Node, NodeSettings};
use hearthnet_bus::{NodeId, NodeKey};
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::Notify;

use crate::support::community::{address, founder, join_as, log_is_whole, serve_bare, static_peer};
use crate::support::*;

const INVITE: [&str; 3] = ["community", "invite", "--json"];

fn data(home: &Home) -> PathBuf {
    home.path().join("data")
}

fn invite(home: &Home) -> Child {
    home.spawn(&[&QUIET[..], &INVITE].concat())
}

fn invited(command: Child) -> Output {
    command.wait_with_output().expect("its end")
}

/// Number of invites in the log, which must be intact.
fn invites(home: &Home) -> usize {
    log_is_whole(home);
    community::invites(home).len()
}

/// Daemon played by this test: it holds the lock and offers the capabilities of `registry`.
struct FakeDaemon {
    _lock: File,
    api: Option<LocalApi>,
    runtime: Runtime,
}

impl FakeDaemon {
    fn start(home: &Home, registry: Registry) -> Self {
        let lock = File::create(data(home).join("node.lock")).expect("a file");
        flock(&lock, FlockOperation::NonBlockingLockExclusive).expect("no daemon runs");
        let runtime = Runtime::new().expect("a runtime");
        let own = NodeKey::generate().expect("a key").id();
        let this_user = OneLevel(Some(Level::Member));
        let server = CallServer::new(own, Arc::new(registry), Arc::new(this_user));
        let api = runtime.block_on(LocalApi::open(&data(home), Arc::new(server)));
        Self {
            _lock: lock,
            api: Some(api.expect("a port")),
            runtime,
        }
    }
}

/// Receives write requests and never answers.
struct Hangs(Arc<Notify>);

impl Handler for Hangs {
    fn call(
        &self,
        _: CallContext,
        _: Value,
        _: FrameSink,
    ) -> BoxFuture<'_, Result<Value, CallError>> {
        self.0.notify_one();
        Box::pin(std::future::pending())
    }
}

#[test]
fn a_daemon_applies_at_once_the_events_written_for_a_command() {
    let founder = founder();
    let node = serve_bare(&founder, &[]);
    let code = community::code(&founder, &[]);
    // The daemon accepts the invite without reading the log from disk again.
    let member = Home::new();
    community::says(&member, &static_peer(&node), &["community", "join", &code]);
    for (how, level) in [("promote", "trusted"), ("demote", "member")] {
        let id = member.node_id();
        founder.says(&["community", how, &id, level]);
        let members = community::members(&founder);
        let found = members.iter().filter(|one| one["node"] == *id);
        let levels: Vec<&Value> = found.map(|one| &one["level"]).collect();
        assert_eq!(levels, [level], "{members:#?}");
    }
    founder.says(&["community", "revoke", &member.node_id(), "--yes"]);
    assert_eq!(invites(&founder), 0);
}

#[test]
fn another_node_cannot_write_through_the_daemon() {
    let founder = founder();
    let node = serve_bare(&founder, &[]);
    let trusted = join_as("trusted", &founder, &node);
    let key = NodeKey::load(&data(&trusted).join("node.key")).expect("a key");
    let log = EventLog::open(&data(&trusted)).expect("a log");
    let founder_id = founder.node_id().parse::<NodeId>().expect("an id");
    let runtime = Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let mut settings = NodeSettings::new("trusted".to_owned());
        settings.discovery = DiscoverySettings {
            own: Some(key.id()),
            community: Some(CommunityTag::of(log.community().as_bytes())),
            mdns: false,
            static_peers: vec![address(&node).parse().expect("an address")],
            ..DiscoverySettings::default()
        };
        let registry = Arc::new(Registry::new());
        let guest = Node::start(Arc::new(key), log, settings, registry).await;
        let guest = guest.expect("a node");
        guest.until_in_sync().await;
        for (name, params) in [
            (
                "node.change@1.0",
                json!({ "by_root": true, "change": { "resume": {} } }),
            ),
            ("node.changes@1.0", json!({})),
        ] {
            let name = name.parse().expect("a capability");
            let call = guest
                .call(founder_id, &name, &params)
                .await
                .expect("a call");
            let refused = call.result().await.expect_err("a refusal");
            assert_eq!(refused.code().as_str(), "unauthorized", "{refused}");
        }
        guest.shutdown().await;
    });
}

#[test]
fn a_command_reaches_the_daemon_through_its_socket_without_a_token() {
    let founder = founder();
    let node = serve_bare(&founder, &[]);
    for file in ["bus.token", "bus.endpoint"] {
        std::fs::remove_file(data(&founder).join(file)).expect("a file");
    }
    succeeded(&founder.run(&[&QUIET[..], &INVITE].concat()));
    // A second `serve` leaves the socket of the first one alone.
    let tail = ["serve", "--model", "none", "--json"];
    succeeded(&founder.run(&[&QUIET[..], &tail].concat()));
    succeeded(&founder.run(&[&QUIET[..], &INVITE].concat()));
    drop(node);
    assert_eq!(invites(&founder), 2);
    // The next daemon replaces the socket of a killed one.
    assert!(data(&founder).join("bus.socket").exists());
    let node = serve_bare(&founder, &[]);
    std::fs::remove_file(data(&founder).join("bus.token")).expect("a file");
    succeeded(&founder.run(&[&QUIET[..], &INVITE].concat()));
    node.signal(Signal::TERM);
    until("the socket is gone", || {
        !data(&founder).join("bus.socket").exists()
    });
}

#[test]
fn without_a_socket_a_command_with_a_wrong_token_writes_nothing() {
    let founder = founder();
    let node = serve_bare(&founder, &[]);
    std::fs::remove_file(data(&founder).join("bus.socket")).expect("a socket");
    std::fs::write(data(&founder).join("bus.token"), "somebody else's\n").expect("a file");
    let refused = founder.run(&[&QUIET[..], &INVITE].concat());
    assert_fails(&refused, 9, "node_runs");
    drop(node);
    assert_eq!(invites(&founder), 0);
}

#[test]
fn a_daemon_of_another_version_is_an_error_with_a_hint() {
    let founder = founder();
    let old = FakeDaemon::start(&founder, Registry::new());
    let refused = founder.run(&[&QUIET[..], &INVITE].concat());
    assert_fails(&refused, 9, "version_unsupported");
    assert_complains(&refused, "stop it and start it again");
    drop(old);
    assert_eq!(invites(&founder), 0);
}

#[test]
fn a_daemon_that_dies_during_a_write_is_an_error_with_a_hint() {
    let founder = founder();
    let registry = Registry::new();
    let heard = Arc::new(Notify::new());
    let name = "node.change@1.0".parse().expect("a capability");
    let any = Params::none().required("by_root", Kind::Flag).required(
        "change",
        Kind::Object {
            fields: Params::none().optional(
                "policy",
                Kind::Object {
                    fields: Params::none()
                        .required("invite", Kind::text(64))
                        .required("research", Kind::Flag),
                },
            ),
        },
    );
    let descriptor = CapabilityDescriptor {
        params: any,
        ..CapabilityDescriptor::new(name, "Hangs.", Some(Level::Member))
    };
    let hangs = Arc::new(Hangs(Arc::clone(&heard)));
    registry.register(descriptor, hangs).expect("a free name");
    let mut daemon = FakeDaemon::start(&founder, registry);
    let policy = ["community", "policy", "--research", "off", "--json"];
    let command = founder.spawn(&[&QUIET[..], &policy].concat());
    daemon.runtime.block_on(heard.notified());
    let api = daemon.api.take().expect("it is open");
    daemon.runtime.block_on(api.close());
    let refused = invited(command);
    assert_fails(&refused, 9, "unreachable");
    assert_complains(
        &refused,
        "`hearthnet log show` shows whether it was written",
    );
}

#[test]
fn if_the_daemon_is_killed_before_the_request_the_command_writes_itself() {
    let founder = founder();
    let mut node = serve_bare(&founder, &[]);
    // A stopped daemon accepts no connection, but holds its lock.
    node.signal(Signal::STOP);
    let command = invite(&founder);
    until("the command asks the daemon", || is_asked(&founder));
    node.end(Signal::KILL);
    succeeded(&invited(command));
    assert_eq!(invites(&founder), 1);
}

/// Whether a client is connected to the local API of a home: the kernel's table then lists more
/// than the listening socket.
fn is_asked(home: &Home) -> bool {
    let socket = data(home).join("bus.socket");
    let socket = socket.to_str().expect("a path");
    let all = std::fs::read_to_string("/proc/net/unix").expect("a table");
    all.lines().filter(|line| line.ends_with(socket)).count() > 1
}

#[test]
fn concurrent_commands_all_write_with_without_and_during_the_start_of_a_daemon() {
    let founder = founder();
    let at_once = || (0..4).map(|_| invite(&founder)).collect::<Vec<_>>();
    let all_wrote = |commands: Vec<Child>| {
        for command in commands {
            succeeded(&invited(command));
        }
    };
    all_wrote(at_once());
    assert_eq!(invites(&founder), 4);
    let starting = at_once();
    let node = serve_bare(&founder, &[]);
    all_wrote(starting);
    assert_eq!(invites(&founder), 8);
    all_wrote(at_once());
    assert_eq!(invites(&founder), 12);
    let stopping = at_once();
    node.signal(Signal::TERM);
    let mut wrote = 12;
    for command in stopping {
        let output = invited(command);
        match output.status.success() {
            true => wrote += 1,
            // The daemon stopped while it processed the request.
            false => assert_fails(&output, 9, "unreachable"),
        }
    }
    assert!((wrote..=16).contains(&invites(&founder)));
}
