//! Operation of the HTTP interface: Unix socket, TLS, named keys, bursts. Real model, real processes,
//! clients in Python.

use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::process::Output;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::*;

/// Result of a scenario of the clients in Python.
fn client(args: &[&str]) -> Value {
    crate::support::client("operations.py", args)
}

/// Service on this machine alone.
fn alone(home: &Home, args: &[&str]) -> Server {
    Server::api(home, &[], model(), &[&["--local"][..], args].concat())
}

/// Runs such a service, which ends by itself.
fn ended(home: &Home, args: &[&str]) -> Output {
    let serve = ["serve", "--json", "--local", "--model", model()];
    home.run(&[&serve[..], &["--http", "127.0.0.1:0"], args].concat())
}

fn text_of(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn url(server: &Server) -> &str {
    server.ready["url"].as_str().expect("a URL")
}

#[test]
fn a_unix_socket_needs_no_key_is_private_and_is_never_taken_from_a_living_service() {
    let home = Home::new();
    let folder = home.path().join("sockets");
    std::fs::create_dir(&folder).expect("a folder");
    let path = folder.join("http.socket");
    let setting = http::with_key(&home);
    let args = ["--http-socket", text_of(&path), "--set", &setting];

    let mut first = alone(&home, &args);
    let found = std::fs::symlink_metadata(&path).expect("a socket");
    assert!(found.file_type().is_socket());
    assert_eq!(mode(&path), 0o600);
    let id = first.ready["models"][0].as_str().expect("a model");
    let id = id.to_owned();
    let ask = || client(&["socket", text_of(&path), &id]);
    let answer = ask();
    assert_eq!(answer["status"], 200, "{answer}");
    // Over the port, the key is needed.
    let (status, _) = http::post_json(&http::address(&first), "/v1/completions", &json!({}));
    assert_eq!(status, 401);

    // Another service is refused by name, and the first one stays.
    let other = Home::new();
    let refused = ended(&other, &args);
    assert_fails(&refused, 9, "host_failed");
    let process = format!("process {} listens there", first.child.id());
    assert_complains(&refused, &process);
    assert_complains(&refused, text_of(&path));
    assert_eq!(ask()["answer"]["choices"], answer["answer"]["choices"]);

    // A killed service leaves its socket behind, which the next one replaces.
    first.end(Signal::KILL);
    assert!(path.exists());
    let mut next = alone(&home, &args);
    assert_eq!(ask()["answer"]["choices"], answer["answer"]["choices"]);
    assert!(next.end(Signal::TERM).success());
    assert!(!path.exists());
}

/// Certificate and key in a folder of their own: settings that name them, and the serial number.
fn certificate(home: &Home, name: &str) -> (Vec<String>, [PathBuf; 2], Value) {
    let folder = home.path().join("tls");
    std::fs::create_dir_all(&folder).expect("a folder");
    let serial = client(&["certificate", text_of(&folder), name])["serial"].clone();
    let files = ["crt", "key"].map(|end| folder.join(format!("{name}.{end}")));
    (tls_settings(&files), files, serial)
}

fn tls_settings([certificate, key]: &[PathBuf; 2]) -> Vec<String> {
    vec![
        "--set".to_owned(),
        format!("http.tls_certificate_file={}", text_of(certificate)),
        "--set".to_owned(),
        format!("http.tls_key_file={}", text_of(key)),
    ]
}

fn refs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

#[test]
fn the_users_certificate_is_served_and_a_renewed_one_without_a_restart() {
    let home = community::founder();
    let (settings, [certificate_file, _], serial) = certificate(&home, "hearth");
    // The daemon is sandboxed, so it also shows that it can read a renewed file.
    let node = community::serve(&home, &refs(&settings));
    let at = url(&node).to_owned();
    assert!(at.starts_with("https://"), "{at}");
    let asked = client(&["https", &at, text_of(&certificate_file)]);
    assert_eq!(
        (&asked["version"], &asked["serial"]),
        (&json!("TLSv1.3"), &serial)
    );
    assert_eq!(asked["models"].as_array().map(Vec::len), Some(1));
    let page = home.says(&["page"]);
    assert_eq!(page, format!("{}/\n", at.trim_end_matches("/v1")));

    let plain = at.trim_start_matches("https://").trim_end_matches("/v1");
    let (status, told) = http::post_json(plain, "/v1/completions", &json!({}));
    assert_eq!(
        (status, &told["error"]["code"]),
        (400, &json!("https_needed"))
    );

    let (_, _, renewed) = certificate(&home, "hearth");
    assert_ne!(renewed, serial);
    let asked = client(&["https", &at, text_of(&certificate_file)]);
    assert_eq!(asked["serial"], renewed);

    // Half of a new pair leaves the earlier one in use.
    let (_, other, _) = certificate(&home, "other");
    let kept = home.path().join("kept.crt");
    std::fs::copy(&certificate_file, &kept).expect("a copy");
    std::fs::rename(&other[0], &certificate_file).expect("a file");
    let asked = client(&["https", &at, text_of(&kept)]);
    assert_eq!(asked["serial"], renewed);
}

#[test]
fn a_wrong_certificate_is_refused_with_what_would_help_and_an_open_key_is_warned_of() {
    let home = Home::new();
    let (settings, files, _) = certificate(&home, "a");
    let (_, others, _) = certificate(&home, "b");
    let mixed = tls_settings(&[files[0].clone(), others[1].clone()]);
    let refused = ended(&home, &refs(&mixed));
    assert_fails(&refused, 2, "bad_config");
    assert_complains(&refused, "does not belong to the first certificate");
    assert_complains(&refused, "openssl x509");
    let refused = ended(&home, &refs(&settings[..2]));
    assert_fails(&refused, 2, "bad_config");
    assert_complains(&refused, "http.tls_key_file is needed");

    chmod(&files[1], 0o644);
    let mut service = alone(&home, &refs(&settings));
    service.end(Signal::TERM);
    let mut told = String::new();
    let stderr = service.child.stderr.as_mut().expect("a pipe");
    std::io::Read::read_to_string(stderr, &mut told).expect("UTF-8");
    let warning = "warning: other users may use the TLS key";
    assert_contains(&told, &[warning, "chmod 600"]);
}

#[test]
fn named_keys_have_limits_are_shown_in_status_and_come_and_go_without_a_restart() {
    let home = community::founder();
    let setting = http::with_key(&home);
    let node = community::serve(&home, &["--set", &setting]);
    let uses = || community::json(&home, &[], &["status"])["node"]["running"]["keys"].clone();
    assert_eq!(uses(), json!([]));

    let add = ["http-key", "add", "kitchen", "--tokens-per-day", "5"];
    let made = community::json(&home, &[], &add);
    let secret = made["key"].as_str().expect("a key");
    let desk = community::json(&home, &[], &["http-key", "add", "desk"]);
    let ask = |key: &str| client(&["key", url(&node), key]);
    let asked = ask(secret);
    assert!(asked["openai"]["text"].is_string(), "{asked}");
    // The first answer has used the tokens of the day.
    let refused = &asked["anthropic"];
    assert_eq!(
        (&refused["status"], &refused["kind"]),
        (&json!(429), &json!("RateLimitError"))
    );
    let after: u64 = refused["retry_after"]
        .as_str()
        .expect("a time")
        .parse()
        .expect("seconds");
    assert!(after > 60, "{refused}");
    assert!(ask(desk["key"].as_str().expect("a key"))["anthropic"]["text"].is_string());
    let shown = uses();
    assert_eq!(
        (&shown[0]["name"], &shown[0]["requests"]),
        (&json!("kitchen"), &json!(2))
    );
    assert_eq!(shown[0]["refused"], 1);
    assert!(shown[0]["tokens"].as_u64() > Some(5), "{shown}");
    assert_eq!(shown[0]["limits"]["tokens_per_day"], 5);
    assert_eq!(
        (&shown[1]["name"], &shown[1]["requests"]),
        (&json!("desk"), &json!(3))
    );
    let status = community::says(&home, &[], &["status"]);
    assert!(
        status.contains("HTTP key") && !status.contains(secret),
        "{status}"
    );
    let stored = std::fs::read_to_string(home.path().join("data/http_keys.json")).expect("a file");
    assert!(
        stored.contains("kitchen") && !stored.contains(secret),
        "{stored}"
    );

    let remove = ["http-key", "remove", "kitchen"];
    community::says(&home, &[], &remove);
    let asked = ask(secret);
    for api in ["openai", "anthropic"] {
        assert_eq!(asked[api]["status"], 401, "{asked}");
    }
    let listed = community::json(&home, &[], &["http-key", "list"]);
    assert_eq!(listed["keys"].as_array().map(Vec::len), Some(1));
    let again = community::run(&home, &[], &remove);
    assert_complains(&again, "there is no key");
}

#[test]
fn status_shows_named_keys_and_their_limits_without_a_community() {
    let home = Home::new();
    let status = || community::run(&home, &[], &["status", "--json"]);
    assert_fails(&status(), 10, "no_community");
    let setting = http::with_key(&home);
    let mut service = alone(&home, &["--set", &setting]);
    let add = words("http-key add kitchen --requests 2 --tokens-per-day 50000");
    let made = community::json(&home, &[], &add);
    let asked = client(&["key", url(&service), made["key"].as_str().expect("a key")]);
    assert!(asked["openai"]["text"].is_string(), "{asked}");

    let shown = || community::json(&home, &[], &["status"]);
    let limits = json!({"requests": 2, "tokens_per_minute": null, "tokens_per_day": 50000});
    let running = shown();
    let used = &running["http_keys"][0];
    assert_eq!(
        (&used["name"], &used["limits"]),
        (&json!("kitchen"), &limits)
    );
    assert!(used["tokens"].as_u64() > Some(0), "{running}");
    assert_eq!(running["node"]["running"]["url"], service.ready["url"]);
    let text = community::says(&home, &[], &["status"]);
    assert!(text.contains("kitchen") && text.contains("50000"), "{text}");

    assert!(service.end(Signal::TERM).success());
    let idle = shown();
    assert_eq!(idle["node"]["running"], Value::Null);
    let unused = &idle["http_keys"][0];
    assert_eq!((&unused["limits"], &unused["tokens"]), (&limits, &json!(0)));
}

#[test]
fn a_burst_of_50_calls_is_answered_in_turn() {
    let home = Home::new();
    let service = alone(&home, &[]);
    let id = service.ready["models"][0].as_str().expect("a model");
    let answers = client(&["burst", url(&service), id]);
    assert_eq!(answers["answers"], 50);
    assert_eq!(
        answers["texts"].as_array().map(Vec::len),
        Some(1),
        "{answers}"
    );
}
