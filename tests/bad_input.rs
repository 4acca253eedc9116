//! Every bad input gets a typed error, a hint and a non-zero exit status, without half-written
//! files, panics or orphaned processes.

use std::io::{BufRead, BufReader, Read};
use std::process::{Output, Stdio};

use rustix::process::{Signal, kill_process};

use crate::support::*;

/// Chat with a very long answer, frame by frame.
const LONG: [&str; 5] = [
    "chat",
    "Count to a thousand in words.",
    "--frames",
    "--max-tokens",
    "4000",
];

#[test]
fn without_consent_no_layer_is_served_and_no_host_is_contacted() {
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
fn a_host_with_another_key_than_named_is_refused() {
    let home = Home::new();
    let mut host = host(&home, "0-29", &[]);
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
fn layers_without_a_host_are_named() {
    let home = Home::new();
    let host = host(&home, "0-9", &[]);
    let output = home.ask("hi", &[&host], &["--no-fallback", "--max-tokens", "1"]);
    assert_fails(&output, 4, "shard_unavailable");
    assert_complains(&output, "layer 10");
}

#[test]
fn a_host_that_does_not_answer_is_named() {
    let home = Home::new();
    let id = Home::new().node_id();
    // Port 1 of loopback, where no program listens.
    let nowhere = format!("127.0.0.1:1#{id}");
    let chat = ["chat", "hi", "--json", "--no-fallback"];
    let output = home.run(&[&ENABLE[..], &chat, &["--shard", &nowhere]].concat());
    assert_fails(&output, 4, "shard_unavailable");
    assert_complains(&output, "127.0.0.1:1");
}

#[test]
fn an_unknown_model_is_an_error_with_a_hint() {
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
    // The hint does not name the command that has just run.
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

/// Runs a standalone host that must refuse these settings. Returns its output.
fn refused_host(layers: &str, settings: &[&str]) -> (Output, String) {
    refused(&Home::new(), model(), layers, settings)
}

/// Same check with a given home and file.
fn refused(home: &Home, path: &str, layers: &str, settings: &[&str]) -> (Output, String) {
    let settings: Vec<&str> = settings.iter().flat_map(|one| ["--set", *one]).collect();
    let serve = ["shard", "serve", "--model", path, "--layers", layers];
    let output = home.run(&[&ENABLE[..], &settings, &serve, &["--json"]].concat());
    let said = text(&output.stderr) + &text(&output.stdout);
    (output, said)
}

#[test]
fn explicit_layers_beyond_the_memory_budget_are_refused_with_the_number_that_fits() {
    let budget = "research.distributed_inference.host.memory_budget_mb=10";
    let (output, said) = refused_host("0-29", &[budget]);
    assert_fails(&output, 2, "bad_config");
    assert!(said.contains("of them do, 0-"), "{said}");
    assert!(said.contains("memory_budget_mb"), "{said}");
}

#[test]
fn a_kv_budget_of_less_than_a_page_is_refused_with_a_hint() {
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
    let home = Home::new();
    home.node_id();
    let key = home.path().join("data/node.key");
    assert_eq!(mode(&key), 0o600);
    chmod(&key, 0o644);
    assert_fails(&home.run(&["id", "--json"]), 13, "host_refused");
}

#[test]
fn a_data_directory_writable_by_others_is_refused_with_a_hint() {
    let home = Home::new();
    home.node_id();
    let data = home.path().join("data");
    chmod(&data, 0o777);
    let refused = home.run(&["id", "--json"]);
    assert_fails(&refused, 13, "host_refused");
    assert_complains(&refused, "chmod go-w");
    let serve = home.run(&["serve", "--local", "--json", "--model", model()]);
    assert_complains(&serve, "chmod go-w");
    chmod(&data, 0o700);
    home.node_id();
}

/// Exit status of a command, within a time that no correct run needs.
fn ends(home: &Home, args: &[&str]) -> Option<i32> {
    let mut patient = std::process::Command::new("timeout");
    wrap(patient.arg("60"), &home.hearthnet(args));
    let output = patient.stdin(Stdio::null()).output().expect("timeout");
    output.status.code()
}

#[test]
fn a_pipe_in_place_of_a_file_blocks_no_command() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let founder = Home::new();
    let create = ["community", "create", "Elm"];
    founder.says(&create);
    for name in words(
        "log.lock log.community community.json clock.json node.lock node.key root.key log.sqlite",
    ) {
        let path = founder.path().join("data").join(name);
        let aside = path.with_extension("aside");
        let _ = std::fs::rename(&path, &aside);
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
        for command in [
            &["status", "--json"][..],
            &["log", "verify"],
            &["community", "members"],
        ] {
            let status = ends(&founder, command);
            assert!(
                status.is_some_and(|status| status != 124),
                "{name}: {command:?}: {status:?}"
            );
        }
        std::fs::remove_file(&path).expect("the pipe");
        let _ = std::fs::rename(&aside, &path);
    }
    let pipe = founder.path().join("pipe.gguf");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
    let pipe = pipe.to_str().expect("a UTF-8 path");
    for (args, status) in [
        (["--config", pipe, "config", "show"], 2),
        (["--catalogue", pipe, "model", "list"], 2),
        (["model", "inspect", pipe, "--json"], 8),
        (["restore", pipe, "--data-dir", "/nonexistent/hearthnet"], 9),
    ] {
        assert_eq!(ends(&founder, &args), Some(status), "{args:?}");
    }
}

#[test]
fn config_check_and_serve_refuse_the_same_settings_with_a_status_that_is_not_restarted() {
    let units = ["", "-layers", "-system"].map(|name| {
        let path = format!(
            "{}/../config/hearthnet{name}.service",
            env!("CARGO_MANIFEST_DIR")
        );
        std::fs::read_to_string(path).expect("a unit")
    });
    let home = Home::new();
    let file = home.path().join("c.toml");
    let named = file.to_str().expect("a UTF-8 path");
    let open = home.path().join("open.key");
    std::fs::write(&open, "0123456789abcdef").expect("a file");
    for text in [
        "[http]\nlisten = \"7602\"".to_owned(),
        "[http]\nlisten = \"0.0.0.0:0\"".to_owned(),
        "[metrics]\nlisten = \"nowhere\"".to_owned(),
        "[http]\napi_key_file = \"/nonexistent/key\"".to_owned(),
        format!("[http]\napi_key_file = {open:?}"),
    ] {
        std::fs::write(&file, &text).expect("a file");
        let check = home.run(&["config", "check", named]);
        let serve = home.run(&["--config", named, "serve", "--local", "--model", model()]);
        for output in [check, serve] {
            let (status, said) = (output.status.code(), self::text(&output.stderr));
            assert_eq!(status, Some(2), "{text}: {said}");
        }
    }
    for unit in units {
        let line = unit
            .lines()
            .find_map(|line| line.strip_prefix("RestartPreventExitStatus="));
        let listed: Vec<&str> = line.expect("a line").split(' ').collect();
        for status in ["2", "3", "6", "7", "8", "10", "13"] {
            assert!(listed.contains(&status), "{status}");
        }
    }
    let flag = home.run(&["serve", "--local", "--http", "7602"]);
    assert_eq!(flag.status.code(), Some(2));
}

#[test]
fn names_that_are_not_utf_8_are_names_of_files() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let home = Home::new();
    let name = home.path().join(OsStr::from_bytes(b"caf\xe9.gguf"));
    std::fs::copy(model(), &name).expect("a copy");
    let run = |args: &[&OsStr]| {
        let mut command = home.hearthnet(&[]);
        command.args(args).output().expect("hearthnet starts")
    };
    let inspected = run(&[
        "model".as_ref(),
        "inspect".as_ref(),
        name.as_ref(),
        "--json".as_ref(),
    ]);
    assert!(inspected.status.success(), "{}", text(&inspected.stderr));
    let data = home.path().join(OsStr::from_bytes(b"d\xe9"));
    let init = run(&[
        "init".as_ref(),
        "--json".as_ref(),
        "--data-dir".as_ref(),
        data.as_ref(),
    ]);
    assert!(init.status.success(), "{}", text(&init.stderr));
    assert!(data.join("node.key").exists());
}

#[test]
fn a_relative_base_directory_is_ignored() {
    let home = Home::new();
    let mut command = home.hearthnet(&["init", "--json"]);
    command
        .env_remove("HEARTHNET_DATA_DIR")
        .env("HOME", home.path())
        .env("XDG_DATA_HOME", "relative")
        .env("XDG_CONFIG_HOME", "./relative")
        .current_dir(home.path());
    let output = command.output().expect("hearthnet starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(home.path().join(".local/share/hearthnet/node.key").exists());
    assert!(!home.path().join("relative").exists());
}

#[test]
fn too_little_memory_for_the_weights_is_reported_as_such() {
    let home = Home::new();
    let shell = "ulimit -v 300000; exec \"$0\" \"$@\"";
    let mut sh = std::process::Command::new("sh");
    sh.args(["-c", shell, env!("CARGO_BIN_EXE_hearthnet")]);
    let chat = "--set engine.threads=1 chat hi --local --json --max-tokens 1 --model";
    let chat = [&words(chat)[..], &[model()]].concat();
    let output = home.hearthnet_with(sh, &chat).output().expect("sh");
    assert_fails(&output, 9, "out_of_memory");
    assert_complains(&output, "a smaller model");
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
    let (mut first, second) = (host(&home, "0-14", &[]), host(&home, "15-29", &[]));
    let over = shards([&first.address, &second.address]);
    let args = [&ENABLE[..], &LONG, &["--no-fallback"], &over].concat();
    let mut chat = Running::start(&mut home.hearthnet(&args));
    // Kills the host once the answer flows.
    let lines = chat.lines.by_ref().map_while(Result::ok);
    let flowing = lines.filter(|line| line.contains("token_delta"));
    assert_eq!(flowing.take(5).count(), 5);
    second.signal(Signal::KILL);
    for line in chat.lines.by_ref() {
        line.expect("UTF-8 frames to the end");
    }
    let error = chat.complaint();
    assert_eq!(chat.status(), Some(4), "{error}");
    let endpoint = second.address.split('#').next().expect("an endpoint");
    assert_contains(&error, &[endpoint, "hint: "]);
    // The other host goes on serving, and ends cleanly when it is asked to.
    let alone = home.ask("hi", &[&first], &["--no-fallback", "--max-tokens", "1"]);
    assert_fails(&alone, 4, "shard_unavailable");
    assert!(text(&alone.stderr).contains("layer 15"));
    assert_eq!(first.process.end(Signal::TERM).code(), Some(0));
}

#[test]
fn ctrl_c_ends_a_chat_at_once_with_its_own_status() {
    let home = Home::new();
    let mut chat = Running::start(&mut home.hearthnet(&[&LONG[..], &["--local"]].concat()));
    chat.line();
    interrupt(&chat.child);
    assert!(chat.lines.by_ref().map_while(Result::ok).count() < 4000);
    assert_eq!(chat.status(), Some(130));
}

#[test]
fn a_reader_that_goes_away_ends_the_chat_without_a_panic() {
    let home = Home::new();
    let mut chat = home.spawn(&[&LONG[..], &["--local"]].concat());
    let mut lines = BufReader::new(chat.stdout.take().expect("a pipe")).lines();
    lines.next().expect("a frame").expect("UTF-8");
    drop(lines);
    let output = chat.wait_with_output().expect("its end");
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(141), "{error}");
    assert!(!error.contains("panicked"), "{error}");
}

/// Starts a demo. Returns its process and those of its hosts once the answer flows.
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
