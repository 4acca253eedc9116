//! The process that computes for a node dies, or its node does.

use rustix::process::kill_process;

use super::*;
use crate::support::community::{founded, json, says};
use crate::support::memory_group::Group;

/// Ends a process as the kernel does when memory is short.
pub(super) fn kill(id: u32) {
    kill_process(pid(id), Signal::KILL).expect("it runs");
    wait_for_end(id);
}

fn engine(host: &Host) -> u32 {
    engine_of(host.process.child.id())
}

#[test]
fn a_host_replaces_a_killed_engine_and_serves_the_next_answer() {
    let scene = Scene::new();
    let fleet = Fleet::new(&scene.caller, 1);
    let before: Vec<u32> = fleet.0.iter().map(engine).collect();
    scene.ask(&fleet.addresses(), false, "before", |_, _| {});
    before.iter().copied().for_each(kill);
    scene.ask(&fleet.addresses(), false, "after", |_, _| {});
    for (host, before) in fleet.0.iter().zip(before) {
        assert_ne!(engine(host), before);
    }
}

#[test]
fn a_kernel_without_memory_ends_the_engine_and_not_its_node() {
    let Some(group) = Group::or_skip("engine", 512 << 20) else {
        return;
    };
    let scene = Scene::new();
    let host = scene.caller.host("0-29", &[]);
    let (daemon, old) = (host.process.child.id(), engine(&host));
    // The next engine is in the group of the process that starts it.
    let starter = children_of(daemon)[0];
    [daemon, starter].into_iter().for_each(|it| group.take(it));
    let ask = |what| scene.ask(std::slice::from_ref(&host.address), false, what, |_, _| {});
    kill(old);
    ask("in the group");

    // More than there is, and less than there is without the engine.
    let first = engine(&host);
    let mut hog = group.hog(group.available() + (32 << 20));
    wait_for_end(first);
    assert_eq!(children_of(daemon), [starter]);
    assert!(hog.process.try_wait().expect("our own process").is_none());
    drop(hog);
    ask("afterwards");
    assert_ne!(engine(&host), first);
}

#[test]
fn an_engine_ends_with_its_killed_node() {
    let home = Home::new();
    let host = host(&home, "0-1", &[]);
    let daemon = host.process.child.id();
    let (starter, engine) = (children_of(daemon)[0], engine(&host));
    host.signal(Signal::KILL);
    wait_for_end(engine);
    wait_for_end(starter);
}

#[test]
fn a_node_outlives_its_engine_and_has_its_memory_outside() {
    let (home, node) = founded(&[]);
    let daemon = node.child.id();
    // Without pages of the model's file.
    let bytes = |id| kernel_number(id, "RssAnon:") << 10;
    let without = bytes(daemon);
    let serve = [
        "shard",
        "serve",
        "--model",
        model(),
        "--layers",
        "2-29",
        "--json",
    ];
    let layers = || Server::start(&home, &[&ENABLE[..], &QUIET, &serve].concat());
    let serving = layers();
    let weights = serving.ready["weight_bytes"].as_u64().expect("a number");
    let first = engine_of(daemon);
    assert!(bytes(first) > weights, "{} {weights}", bytes(first));
    // The node may be measuring its own layers, which takes memory for a moment. It keeps the trie of
    // its model's vocabulary, 25 MB, for answers by a grammar.
    until("the node has hardly more memory than before", || {
        bytes(daemon).saturating_sub(without) < weights / 4 + (28 << 20)
    });

    // The kernel would end the engine, not the node.
    let adjusted = std::fs::read_to_string(format!("/proc/{first}/oom_score_adj"));
    assert_eq!(adjusted.expect("it runs").trim(), "800");
    assert_eq!(kernel_number(first, "NoNewPrivs:"), 1);
    assert_eq!(kernel_number(first, "Seccomp:"), 2);

    kill(first);
    let status = json(&home, &[], &["status"]);
    assert!(status["node"]["running"].is_object(), "{status}");
    says(&home, &[], &["community", "members"]);

    // Layers that are given up take their engine, and its memory, with them.
    drop(serving);
    let mut serving = layers();
    let second = engine_of(daemon);
    assert!(serving.end(Signal::INT).success());
    wait_for_end(second);
}
