//! What bad input gets: a typed error, a sentence that says what to do, a non-zero
//! exit status, nothing half-written, no panic, no orphan.
#![allow(clippy::expect_used, clippy::panic, reason = "so a test fails")]

mod support;

use std::io::{BufRead, BufReader, Read};
use std::process::{Output, Stdio};

use rustix::process::{Signal, kill_process};
use support::{
    ENABLE, Home, Host, assert_complains, assert_fails, children_of, interrupt, model, pid, shards,
    text, wait_for_end,
};

/// A chat that says more than anybody waits for, frame by frame.
const LONG: [&str; 5] = [
    "chat",
    "Count to a thousand in words.",
    "--frames",
    "--max-tokens",
    "4000",
];

#[test]
fn without_consent_nothing_is_served_and_nobody_is_asked() {
    let home = Home::new();
    let serve = ["shard", "serve", "--model", model()];
    let serve = home.run(&[&serve[..], &["--layers", "0-1", "--json"]].concat());
    assert_fails(&serve, 7, "experimental_disabled");
    assert_complains(&serve, "policy.research.enable");
    let nowhere = format!("127.0.0.1:1#{}", home.node_id());
    let chat = home.run(&["chat", "hi", "--json", "--shard", &nowhere]);
    assert_fails(&chat, 7, "experimental_disabled");
}

#[test]
fn a_key_that_was_not_admitted_is_refused() {
    let (host_home, stranger) = (Home::new(), Home::new());
    let host = Host::start(&host_home, model(), "0-29", &host_home.node_id(), &[]);
    let output = stranger.ask("hi", &[&host], &["--no-fallback", "--max-tokens", "1"]);
    assert_fails(&output, 4, "shard_unavailable");
}

#[test]
fn a_host_with_another_key_than_named_is_refused() {
    let home = Home::new();
    let own = Home::new();
    let mut host = Host::start(&own, model(), "0-29", &home.node_id(), &[]);
    let (endpoint, _) = host.address.split_once('#').expect("an endpoint");
    host.address = format!("{endpoint}#{}", Home::new().node_id());
    let output = home.ask("hi", &[&host], &["--no-fallback", "--max-tokens", "1"]);
    assert_fails(&output, 4, "shard_unavailable");
    assert_complains(&output, "identity");
}

#[test]
fn a_host_with_other_weights_is_refused() {
    let home = Home::new();
    let other = hearthnet_testkit::variant("q8_0");
    let other = other.to_str().expect("a UTF-8 path");
    let own = Home::new();
    let host = Host::start(&own, other, "0-29", &home.node_id(), &[]);
    let extra = ["--no-fallback", "--max-tokens", "1", "--model", model()];
    let output = home.ask("hi", &[&host], &extra);
    assert!(
        matches!(output.status.code(), Some(4 | 6)),
        "{}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    assert_complains(&output, "hint: ");
}

#[test]
fn layers_that_nobody_holds_are_named() {
    let home = Home::new();
    let own = Home::new();
    let host = Host::start(&own, model(), "0-9", &home.node_id(), &[]);
    let output = home.ask("hi", &[&host], &["--no-fallback", "--max-tokens", "1"]);
    assert_fails(&output, 4, "shard_unavailable");
    assert_complains(&output, "layer 10");
}

#[test]
fn a_host_that_does_not_answer_is_named() {
    let home = Home::new();
    let id = Home::new().node_id();
    // Port 1 of loopback: nobody listens there.
    let nowhere = format!("127.0.0.1:1#{id}");
    let chat = ["chat", "hi", "--json", "--no-fallback"];
    let output = home.run(&[&ENABLE[..], &chat, &["--shard", &nowhere]].concat());
    assert_fails(&output, 4, "shard_unavailable");
    assert_complains(&output, "127.0.0.1:1");
}

#[test]
fn an_unknown_model_is_a_sentence_with_what_to_do() {
    let home = Home::new();
    let chat = ["chat", "hi", "--local", "--json", "--model"];
    let output = home.run(&[&chat[..], &["no-such-model"]].concat());
    assert_fails(&output, 3, "bad_request");
    assert_complains(&output, "hint: ");
}

#[test]
fn files_that_are_no_models_are_refused_by_name() {
    let home = Home::new();
    let whole = std::fs::read(model()).expect("the model");
    let named = |name: &str| {
        let path = home.path().join(name);
        path.to_str().expect("a UTF-8 path").to_owned()
    };
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(named(name), bytes).expect("a file");
        named(name)
    };
    for path in [
        write("empty.gguf", b""),
        write("nonsense.gguf", &[0x5a; 4096]),
        write("cut.gguf", &whole[..whole.len() / 2]),
        write("header.gguf", &whole[..24]),
        named(""),
        named("missing.gguf"),
    ] {
        let output = home.run(&["model", "inspect", &path, "--json"]);
        assert_fails(&output, 8, "model_unavailable");
        let (output, _) = refused(&home, &path, "0-1", &[]);
        assert_fails(&output, 8, "model_unavailable");
    }
}

#[test]
fn a_file_of_an_unknown_architecture_is_described_before_it_is_refused() {
    let home = Home::new();
    let mut file = std::fs::read(model()).expect("the model");
    let name: &[u8] = b"\x05\0\0\0\0\0\0\0llama";
    let at = file.windows(name.len()).position(|w| w == name);
    let at = at.expect("the architecture") + 8;
    file[at..at + 5].copy_from_slice(b"lemma");
    let path = home.path().join("other.gguf");
    std::fs::write(&path, file).expect("a file");
    let path = path.to_str().expect("a UTF-8 path");
    let output = home.run(&["model", "inspect", path]);
    assert_eq!(output.status.code(), Some(8));
    let said = text(&output.stdout);
    assert!(said.contains("architecture  lemma"), "{said}");
    assert!(said.contains("stored as     Q4_1"), "{said}");
    let error = text(&output.stderr);
    assert!(error.contains("supported are: llama"), "{error}");
    // Not what has just been done.
    assert!(!error.contains("hearthnet model inspect"), "{error}");
    let output = home.run(&["model", "inspect", path, "--json"]);
    assert_fails(&output, 8, "model_unavailable");
    assert!(text(&output.stdout).contains(r#""architecture":"lemma""#));
}

#[test]
fn a_port_in_use_is_named() {
    let home = Home::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let serve = ["shard", "serve", "--model", model(), "--json"];
    let how = ["--layers", "0-1", "--listen", &address];
    let output = home.run(&[&ENABLE[..], &serve, &how].concat());
    assert_fails(&output, 9, "host_failed");
    assert_complains(&output, &address);
}

#[test]
fn layers_beyond_the_model_are_refused() {
    let (output, _) = refused_host("20-30", &[]);
    assert_fails(&output, 3, "bad_request");
}

/// A host served by hand with these settings: what it says before it would serve.
fn refused_host(layers: &str, settings: &[&str]) -> (Output, String) {
    refused(&Home::new(), model(), layers, settings)
}

/// The same of a home's own, with any file.
fn refused(home: &Home, path: &str, layers: &str, settings: &[&str]) -> (Output, String) {
    let settings: Vec<&str> = settings.iter().flat_map(|one| ["--set", *one]).collect();
    let serve = ["shard", "serve", "--model", path, "--layers", layers];
    let output = home.run(&[&ENABLE[..], &settings, &serve, &["--json"]].concat());
    let said = text(&output.stderr) + &text(&output.stdout);
    (output, said)
}

#[test]
fn layers_named_by_hand_that_the_memory_does_not_hold_are_refused_with_those_that_fit() {
    let budget = "research.distributed_inference.host.memory_budget_mb=10";
    let (output, said) = refused_host("0-29", &[budget]);
    assert_fails(&output, 9, "host_failed");
    assert!(said.contains("of them do, 0-"), "{said}");
    assert!(said.contains("memory_budget_mb"), "{said}");
}

#[test]
fn a_kv_budget_of_less_than_a_page_is_refused_with_what_to_set() {
    let (output, said) = refused_host(
        "0-29",
        &[
            "research.distributed_inference.host.kv_budget_mb=1",
            "research.distributed_inference.host.kv_share_per_caller_percent=1",
        ],
    );
    assert_fails(&output, 2, "bad_config");
    assert!(said.contains("kv_budget_mb"), "{said}");
}

#[test]
fn a_key_file_that_others_can_read_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let home = Home::new();
    home.node_id();
    let key = home.path().join("data/node.key");
    let mode = std::fs::metadata(&key)
        .expect("the key")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).expect("chmod");
    assert_fails(&home.run(&["id", "--json"]), 9, "host_failed");
}

#[test]
fn sampling_out_of_range_and_too_long_prompts_are_bad_requests() {
    let home = Home::new();
    let ask = |extra: &[&str], prompt: &str| {
        let mut args = vec!["chat", prompt, "--local", "--json"];
        args.extend(extra);
        home.run(&args)
    };
    assert_fails(&ask(&["--temperature=-1"], "hi"), 3, "bad_request");
    assert_fails(&ask(&["--top-p", "1.5"], "hi"), 3, "bad_request");
    assert_fails(&ask(&["--max-tokens", "0"], "hi"), 3, "bad_request");
    assert_fails(&ask(&["--stop", ""], "hi"), 3, "bad_request");
    assert_fails(&ask(&[], &"word ".repeat(9000)), 3, "bad_request");
}

#[test]
fn a_host_killed_in_mid_answer_ends_the_chat_with_its_name_and_no_orphan() {
    let home = Home::new();
    let (a, b) = (Home::new(), Home::new());
    let first = Host::start(&a, model(), "0-14", &home.node_id(), &[]);
    let second = Host::start(&b, model(), "15-29", &home.node_id(), &[]);
    let over = shards([&first.address, &second.address]);
    let mut chat = home.spawn(&[&ENABLE[..], &LONG, &["--no-fallback"], &over].concat());
    let mut lines = BufReader::new(chat.stdout.take().expect("a pipe")).lines();
    // Kill once the answer flows.
    let flowing = lines
        .by_ref()
        .map_while(Result::ok)
        .filter(|l| l.contains("token_delta"));
    assert_eq!(flowing.take(5).count(), 5);
    second.signal(Signal::KILL);
    for line in lines {
        line.expect("UTF-8 frames to the end");
    }
    let mut error = String::new();
    chat.stderr
        .take()
        .expect("a pipe")
        .read_to_string(&mut error)
        .expect("UTF-8");
    assert_eq!(chat.wait().expect("an end").code(), Some(4), "{error}");
    let endpoint = second.address.split('#').next().expect("an endpoint");
    assert!(
        error.contains(endpoint) && error.contains("hint: "),
        "{error}"
    );
    // The other host goes on serving.
    let alone = home.ask("hi", &[&first], &["--no-fallback", "--max-tokens", "1"]);
    assert_fails(&alone, 4, "shard_unavailable");
    assert!(text(&alone.stderr).contains("layer 15"));
}

#[test]
fn ctrl_c_ends_a_chat_at_once_with_its_own_status() {
    let home = Home::new();
    let mut chat = home.spawn(&[&LONG[..], &["--local"]].concat());
    let mut lines = BufReader::new(chat.stdout.take().expect("a pipe")).lines();
    lines.next().expect("a frame").expect("UTF-8");
    interrupt(&chat);
    assert!(lines.map_while(Result::ok).count() < 4000);
    assert_eq!(chat.wait().expect("an end").code(), Some(130));
}

#[test]
fn sigterm_ends_a_host_cleanly() {
    let home = Home::new();
    let mut host = Host::start(&home, model(), "0-1", &home.node_id(), &[]);
    host.signal(Signal::TERM);
    assert_eq!(host.process.child.wait().expect("an end").code(), Some(0));
}

#[test]
fn a_reader_that_goes_away_ends_the_chat_without_a_panic() {
    let home = Home::new();
    let mut chat = home.spawn(&[&LONG[..], &["--local"]].concat());
    let mut lines = BufReader::new(chat.stdout.take().expect("a pipe")).lines();
    lines.next().expect("a frame").expect("UTF-8");
    drop(lines);
    let mut error = String::new();
    chat.stderr
        .take()
        .expect("a pipe")
        .read_to_string(&mut error)
        .expect("UTF-8");
    assert_eq!(chat.wait().expect("an end").code(), Some(141), "{error}");
    assert!(!error.contains("panicked"), "{error}");
}

/// Starts a demo and gives its process and those of its hosts once the answer flows.
fn running_demo(home: &Home) -> (std::process::Child, Vec<u32>) {
    let mut demo = home
        .hearthnet(&["demo", "Count to a thousand.", "--max-tokens", "4000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("hearthnet starts");
    let mut byte = [0];
    demo.stdout
        .as_mut()
        .expect("a pipe")
        .read_exact(&mut byte)
        .expect("the answer begins");
    let hosts = children_of(demo.id());
    assert_eq!(hosts.len(), 2, "two hosts run");
    (demo, hosts)
}

#[test]
fn hosts_do_not_outlive_a_demo_that_is_killed() {
    let home = Home::new();
    let (mut demo, hosts) = running_demo(&home);
    demo.kill().expect("it runs");
    demo.wait().expect("an end");
    for host in hosts {
        wait_for_end(host);
    }
}

#[test]
fn hosts_do_not_outlive_a_demo_that_is_interrupted_and_nothing_is_left_behind() {
    let home = Home::new();
    let (mut demo, hosts) = running_demo(&home);
    interrupt(&demo);
    assert_eq!(demo.wait().expect("an end").code(), Some(130));
    for host in hosts {
        wait_for_end(host);
    }
    let left: Vec<_> = std::fs::read_dir(home.path())
        .expect("the home")
        .flatten()
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_killed_host_ends_the_demo_and_the_other_host() {
    let home = Home::new();
    let (mut demo, hosts) = running_demo(&home);
    kill_process(pid(hosts[0]), Signal::KILL).expect("it runs");
    let mut rest = Vec::new();
    demo.stdout
        .take()
        .expect("a pipe")
        .read_to_end(&mut rest)
        .expect("output");
    assert_eq!(demo.wait().expect("an end").code(), Some(4));
    wait_for_end(hosts[1]);
}
