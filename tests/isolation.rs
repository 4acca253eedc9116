//! Sandbox of the daemon: its user has private files in the home directory, and no request can make
//! the daemon read them. Real processes.

use crate::support::community::founder;
use crate::support::*;

fn line<'a>(status: &'a str, name: &str) -> &'a str {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.expect("a line of the kernel's").trim()
}

#[test]
fn a_daemon_has_no_new_privileges_and_reports_its_isolation() {
    let home = founder();
    let node = serve(&home, "none");
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.child.id()));
    let status = status.expect("it runs");
    assert_eq!(line(&status, "NoNewPrivs:"), "1");
    assert_eq!(line(&status, "Seccomp:"), "2");
    let running = home.json(&["status", "--json"])["node"]["running"].clone();
    let stands = running["isolation"].as_str().expect("a line");
    assert!(stands.contains("system calls, memory"), "{stands}");
    let diagnosed = home.run(&["diagnose"]);
    assert_complains(&diagnosed, stands);
}

#[test]
fn a_daemon_cannot_be_made_to_read_a_private_file_of_its_user() {
    let home = founder();
    let letter = home.path().join("home/letter.gguf");
    let node = serve(&home, "none");
    std::fs::write(&letter, "Dear Ana").expect("a file");
    if line_of_files(&home).contains("NOT") {
        // Without Landlock in the kernel there is nothing to test.
        return;
    }
    let asked = |path: &str| {
        let layers = [
            "shard", "serve", "--model", path, "--layers", "0-1", "--json",
        ];
        let mut command = home.hearthnet(&[&ENABLE[..], &QUIET, &layers].concat());
        command.env("HOME", home.path().join("home"));
        command
    };
    let path = letter.to_str().expect("a UTF-8 path");
    let refused = asked(path).output().expect("its end");
    assert_complains(&refused, "ermission denied");
    // A model outside of the home directory can be read.
    drop(Server::run(&mut asked(model())));
    drop(node);
}

/// Copies a model into the user's home directory.
fn own_model(home: &Home) -> std::path::PathBuf {
    let folder = home.path().join("home/models");
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = folder.join("own.gguf");
    std::fs::copy(model(), &file).expect("a model");
    file
}

/// Command of a user whose home directory is this test's.
fn at_home(home: &Home, args: &[&str]) -> std::process::Command {
    let mut command = home.hearthnet(args);
    command.env("HOME", home.path().join("home"));
    command.env_remove("XDG_CACHE_HOME");
    command
}

#[test]
fn an_isolated_daemon_writes_the_hash_record_of_a_model() {
    let home = Home::new();
    let file = own_model(&home);
    let path = file.to_str().expect("a UTF-8 path");
    let serve = ["shard", "serve", "--model", path, "--layers", "0-1"];
    let how = ["--json", "--lifeline", "--peer-key", &home.node_id()];
    let mut command = at_home(&home, &[&serve[..], &how, &ENABLE].concat());
    drop(Server::run(&mut command));
    let record = file.with_extension("gguf.hearthnet");
    assert!(record.exists(), "it would read all of it at every start");
}

#[test]
fn model_commands_work_without_access_to_other_files_of_their_user() {
    let home = Home::new();
    let file = own_model(&home);
    let path = file.to_str().expect("a UTF-8 path");
    let out = home.path().join("home/models/small.gguf");
    let to = out.to_str().expect("a UTF-8 path");
    for args in [
        &["model", "inspect", path][..],
        &["model", "verify", path, "--accept"],
        &["model", "convert", path, "--to", "q8_0", "--output", to],
        &["model", "inspect", to],
    ] {
        let output = at_home(&home, args).output().expect("its end");
        assert!(output.status.success(), "{args:?}: {output:?}");
    }
}

/// File part of the isolation that the daemon reports.
fn line_of_files(home: &Home) -> String {
    let status = home.json(&["status", "--json"]);
    let stands = status["node"]["running"]["isolation"].as_str();
    let stands = stands.expect("a line").split(", ").next();
    stands.unwrap_or_default().to_owned()
}

fn serve(home: &Home, model: &str) -> Server {
    std::fs::create_dir_all(home.path().join("home")).expect("a folder");
    let serve = words("--set http.listen=127.0.0.1:0 serve --listen 127.0.0.1:0 --json --lifeline");
    let args = [&QUIET[..], &ENABLE, &serve, &["--model", model]].concat();
    let mut command = home.hearthnet(&args);
    command.env("HOME", home.path().join("home"));
    Server::run(&mut command)
}
