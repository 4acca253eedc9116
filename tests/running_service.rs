//! `hearthnet chat` beside a running `hearthnet serve`: it asks the service, and its output is the
//! same as without one. Real model, real processes.

use std::io::Read;
use std::net::TcpListener;
use std::process::Output;

use hearthnet_testkit::TinyLlama;
use rustix::process::Signal;
use serde_json::Value;

use crate::support::http::{address, get_json};
use crate::support::*;

const PROMPT: &str = "Name three colours, and say why.";
const SAID: &str = "asking the service";
const TOKENS: [&str; 6] = ["--max-tokens", "24", "--seed", "7", "--temperature", "0.8"];

/// Starts `hearthnet serve --local`.
fn serve(home: &Home) -> Server {
    Server::api(home, &[], model(), &["--local"])
}

fn chat(home: &Home, args: &[&str]) -> Output {
    let ask = ["chat", PROMPT, "--model", model()];
    home.run(&[&ask[..], &TOKENS, args].concat())
}

fn asked_it(output: &Output) -> bool {
    text(&output.stderr).contains(SAID)
}

/// Frames without times and without the computing nodes.
fn frames(output: &Output) -> Vec<Value> {
    let lines = text(&output.stdout);
    let mut frames: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON"))
        // Progress frames depend on timing.
        .filter(|frame| frame["event"] != "prompt_progress")
        .collect();
    let done = frames.last_mut().expect("a frame");
    let done = match done.get_mut("data") {
        Some(data) => data,
        None => done,
    };
    for varies in ["timings", "route"] {
        assert!(done.as_object_mut().expect("done").remove(varies).is_some());
    }
    frames
}

#[test]
fn output_through_the_service_equals_local_output() {
    let home = Home::new();
    let service = serve(&home);
    for form in [&[][..], &["--raw"], &["--stop", "and"], &["--explain"]] {
        let (asked, alone) = (
            chat(&home, form),
            chat(&home, &[form, &["--local"]].concat()),
        );
        assert!(asked.status.success(), "{}", text(&asked.stderr));
        assert!(asked_it(&asked) && !asked_it(&alone));
        assert_eq!(text(&asked.stdout), text(&alone.stdout), "{form:?}");
        let explained = text(&asked.stderr).contains("compute ms");
        assert_eq!(explained, form == ["--explain"], "{}", text(&asked.stderr));
    }
    for form in [&["--json"][..], &["--frames", "--logprobs", "3"]] {
        let (asked, alone) = (
            chat(&home, form),
            chat(&home, &[form, &["--local"]].concat()),
        );
        // With the prefix cache the service reports cached tokens; everything else must be equal.
        let [mut asked_frames, alone_frames] = [&asked, &alone].map(frames);
        let done = asked_frames.last_mut().expect("a frame");
        let usage = match done.get_mut("data") {
            Some(data) => &mut data["usage"],
            None => &mut done["usage"],
        };
        assert!(usage["cached_tokens"].as_u64().is_some_and(|n| n > 0));
        usage["cached_tokens"] = 0.into();
        assert_eq!(asked_frames, alone_frames, "{form:?}");
        assert_eq!(asked_it(&asked), form != ["--json"]);
    }
    // Failures give the same text, code and exit status.
    let long = "long ".repeat(9000);
    let ask =
        |more: &[&str]| home.run(&[&["chat", &long, "--json", "--model", model()], more].concat());
    let (asked, alone) = (ask(&[]), ask(&["--local"]));
    assert_fails(&asked, 3, "bad_request");
    assert_eq!(asked.stdout, alone.stdout);
    let health = get_json(&address(&service), "/healthz");
    assert_eq!(health["running"], 0, "{health}");
}

#[test]
fn a_conversation_continues_from_the_services_prefix_cache() {
    let home = Home::new();
    let _service = serve(&home);
    let talk = |more: &[&str]| {
        let chat = ["chat", "--lines", "--json", "--model", model()];
        let args = [&chat[..], &TOKENS, more].concat();
        let turns = succeeded(&home.run_with(&args, "Hello there, friend.\nWhy is that?\n"));
        let turns: Vec<Value> = turns
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        turns
            .iter()
            .map(|turn| (turn["text"].clone(), turn["usage"].clone()))
            .collect::<Vec<_>>()
    };
    let asked = talk(&[]);
    assert_eq!(asked.len(), 2);
    assert!(asked[1].1["cached_tokens"].as_u64().is_some_and(|n| n > 24));
    assert_eq!(asked, talk(&["--local"]));
}

#[test]
fn an_interrupt_ends_the_chat_on_both_sides() {
    let home = Home::new();
    let service = serve(&home);
    let model = model();
    let story = "Write a very long story about the sea.";
    let mut child = home.spawn(&["chat", story, "--model", model, "--max-tokens", "4000"]);
    let mut stdout = child.stdout.take().expect("a pipe");
    stdout.read_exact(&mut [0]).expect("the first word");
    assert_eq!(get_json(&address(&service), "/healthz")["running"], 1);
    interrupt(&child);
    let output = child.wait_with_output().expect("its end");
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("error: cancelled"));
    until("it answers no more", || {
        get_json(&address(&service), "/healthz")["running"] == 0
    });
}

#[test]
fn requests_that_the_service_cannot_serve_run_locally() {
    let home = Home::new();
    let _service = serve(&home);
    for form in [
        &["--no-service"][..],
        &["--no-fallback"],
        &["--set", "research.distributed_inference.prefill_rows=16"],
        &["--model", "/nowhere/else.gguf"],
        &[
            "--shard",
            "127.0.0.1:1#ed25519:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        ],
    ] {
        let mut args = vec!["chat", PROMPT];
        if !form.contains(&"--model") {
            args.extend(["--model", model()]);
        }
        let output = home.run(&[&args[..], form].concat());
        assert!(!asked_it(&output), "{form:?}");
        assert!(!output.status.success(), "only the service could answer");
    }
}

#[test]
fn a_stopped_service_is_reported_with_its_process_id_at_once() {
    let home = Home::new();
    let service = serve(&home);
    service.signal(Signal::STOP);
    let id = service.child.id();
    let named = format!("process {id}, which is stopped, does not answer");
    let output = chat(&home, &["--json"]);
    assert_fails(&output, 7, "experimental_disabled");
    let failure: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let hint = failure["error"]["hint"].as_str().expect("a hint");
    assert_contains(hint, &[&named, &format!("kill -CONT {id}")]);
    assert_complains(
        &output,
        &format!("warning: the service on this machine, {named}"),
    );
}

/// Resumes a stopped service, however the test ends.
struct Stopped<'a>(&'a Server);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::CONT);
    }
}

#[test]
fn a_service_stopped_during_an_answer_is_reported_and_the_rest_runs_locally() {
    let home = Home::new();
    let service = serve(&home);
    let settings = home.path().join("settings.toml");
    let own = "[policy.research]\nenable = true\n[research.distributed_inference]\n\
               shard_health_timeout_seconds = 5.0\n";
    std::fs::write(&settings, own).expect("a file");
    community::found(&home);
    let story = ["chat", "Tell me a story about a whale.", "--model", model()];
    let how = ["--max-tokens", "400", "--seed", "11"];
    let alone = home.run(&[&story[..], &how, &["--local"]].concat());
    let settings = settings.to_str().expect("a path");
    let mut child = home.spawn(&[&["--config", settings], &story[..], &how].concat());
    let mut stdout = child.stdout.take().expect("a pipe");
    let mut heard = vec![0; 60];
    stdout.read_exact(&mut heard).expect("the first words");
    service.signal(Signal::STOP);
    let _goes_on = Stopped(&service);
    stdout.read_to_end(&mut heard).expect("the rest");
    let output = child.wait_with_output().expect("its end");
    succeeded(&output);
    let id = service.child.id();
    let named = format!("process {id}, which is stopped, does not answer; waiting up to");
    assert_complains(&output, &named);
    assert_complains(&output, "continuing without the service");
    assert_eq!(text(&heard), text(&alone.stdout));
}

#[test]
fn a_stale_endpoint_of_a_killed_service_is_not_used() {
    let home = Home::new();
    let mut service = serve(&home);
    service.end(Signal::KILL);
    let endpoint = home.path().join("data/service/bus.endpoint");
    let endpoint = std::fs::read_to_string(endpoint).expect("its endpoint, still there");
    let address = endpoint.trim().trim_start_matches("ws://");
    let address = address.trim_end_matches("/bus/v1");
    // Another program has taken the port of the killed service, and must not be contacted.
    let other = TcpListener::bind(address).expect("its port");
    other.set_nonblocking(true).expect("a socket");
    let output = chat(&home, &["--json"]);
    assert_fails(&output, 7, "experimental_disabled");
    assert!(other.accept().is_err(), "the other program was contacted");
    // A new service takes its place.
    drop(other);
    let _service = serve(&home);
    assert!(asked_it(&chat(&home, &[])));
}

#[test]
fn the_end_of_a_community_service_costs_no_token() {
    let (founder, mut service) = community::founded(&[]);
    let member = community::join(&founder, &service);
    let _host = community::host(&member, &service, "0-29");
    let story = ["chat", "Tell me a story about a whale."];
    let story = [&story[..], &["--model", model()]].concat();
    // No sampling flags: both sides use the model's defaults.
    let long = ["--max-tokens", "160", "--frames", "--seed", "11"];
    let args = [&ENABLE[..], &story, &long].concat();
    let alone = [&args[..], &["--local"]].concat();
    let alone = founder.run(&alone);

    let mut child = founder.spawn(&args);
    let mut stdout = child.stdout.take().expect("a pipe");
    let mut heard = vec![0; 600];
    stdout.read_exact(&mut heard).expect("the first words");
    service.end(Signal::KILL);
    stdout.read_to_end(&mut heard).expect("the rest");
    let output = child.wait_with_output().expect("its end");
    succeeded(&output);
    assert_complains(&output, SAID);
    assert_complains(&output, "continuing without");
    let tokens = |bytes: &[u8]| -> Vec<String> {
        let lines = text(bytes);
        let deltas = lines.lines().filter(|line| line.contains("token_delta"));
        deltas.map(str::to_owned).collect()
    };
    assert_eq!(tokens(&heard), tokens(&alone.stdout));
}

#[test]
fn a_service_with_a_replaced_model_file_is_not_used_for_the_new_file() {
    let home = Home::new();
    let file = |seed| TinyLlama {
        seed,
        ..TinyLlama::default()
    };
    let path = home.path().join("m.gguf");
    std::fs::write(&path, file(1).bytes()).expect("a file");
    let name = path.to_str().expect("UTF-8");
    let _service = Server::api(&home, &[], name, &["--local"]);
    let ask = |args: &[&str]| home.run(&[&["chat", "hi"][..], &TOKENS, args].concat());
    let before = ask(&["--model", name]);
    assert!(asked_it(&before), "{}", text(&before.stderr));

    let new = home.path().join("new.gguf");
    std::fs::write(&new, file(2).bytes()).expect("a file");
    std::fs::rename(&new, &path).expect("the same folder");
    // A chat that names the file is not answered with the earlier one.
    let refused = ask(&["--model", name]);
    assert_complains(&refused, "with an earlier file than the one now at");
    assert!(!asked_it(&refused));
    assert_eq!(refused.status.code(), Some(7), "{}", text(&refused.stderr));
    let changed = ask(&["--model", name, "--local"]);
    assert_eq!(changed.status.code(), Some(8), "{}", text(&changed.stderr));
    succeeded(&home.run(&["model", "verify", name, "--accept"]));
    let alone = succeeded(&ask(&["--model", name, "--local"]));
    assert_ne!(succeeded(&before), alone);
    // A chat that names no file is told.
    let unnamed = ask(&[]);
    assert!(asked_it(&unnamed), "{}", text(&unnamed.stderr));
    assert_complains(&unnamed, "warning: the service on this machine");
    assert_eq!(succeeded(&unnamed), succeeded(&before));
}
