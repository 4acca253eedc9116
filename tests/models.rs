//! Models in everyday use: named in every way, fetched, listed, verified, changed, removed.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;

use hearthnet_files::Digest;
use hearthnet_files::gguf::Value as Metadata;
use hearthnet_files::gguf::writer::Writer;
use hearthnet_files::manifest::{Manifest, record_path};
use hearthnet_testkit::{TinyLlama, split, with_metadata, with_nan, write_split};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::support::*;

/// Home with a cache of its own and a catalogue with the one model `tiny`.
struct Place {
    home: Home,
    catalogue: PathBuf,
    bytes: Vec<u8>,
}

impl Place {
    fn new() -> Self {
        Self::with_pins(true)
    }

    /// Same home; without pins, only the size identifies the model's file.
    fn with_pins(pinned: bool) -> Self {
        let home = Home::new();
        let tiny = TinyLlama::default();
        let (bytes, file) = (tiny.bytes(), tiny.file());
        let weights = Manifest::of(&file, &mut |_, _| {}).weights_id();
        let catalogue = home.path().join("models.toml");
        let pins = match pinned {
            true => format!(
                "sha256 = \"{}\"\nweights = \"{weights}\"\n",
                Digest::of(&bytes)
            ),
            false => String::new(),
        };
        fs::write(
            &catalogue,
            format!(
                "[models.tiny]\nname = \"Tiny\"\nlicense = \"Tiny Terms\"\n\
                 terms = \"https://example.org/terms\"\nfile = \"tiny.gguf\"\nbytes = {}\n{pins}\
                 sources = [{{ kind = \"hf\", repository = \"o/r\", revision = \"main\", file = \"tiny.gguf\" }}]\n",
                bytes.len(),
            ),
        )
        .expect("a catalogue");
        Self {
            home,
            catalogue,
            bytes,
        }
    }

    fn run_at(&self, hub: &str, args: &[&str]) -> Output {
        self.home
            .hearthnet(args)
            .env("XDG_CACHE_HOME", self.home.path().join("cache"))
            .env("HEARTHNET_CATALOGUE", &self.catalogue)
            .env("HF_ENDPOINT", hub)
            .output()
            .expect("hearthnet starts")
    }

    fn run(&self, args: &[&str]) -> Output {
        self.run_at("http://127.0.0.1:1", args)
    }

    /// Writes a file of this home. Returns its path.
    fn write(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.home.path().join(name);
        fs::write(&path, bytes).expect("a file");
        path.to_str().expect("UTF-8").to_owned()
    }

    /// JSON output of a command that must succeed.
    fn json(&self, args: &[&str]) -> Value {
        json_output(&self.run(args))
    }

    fn models(&self) -> PathBuf {
        self.home.path().join("cache/hearthnet/models")
    }

    /// Path of the catalogue's model.
    fn file(&self) -> PathBuf {
        self.models().join("tiny/tiny.gguf")
    }

    /// Home that has pulled the catalogue's model from a file.
    fn pulled() -> Self {
        let place = Self::new();
        let source = place.write("source.gguf", &place.bytes);
        succeeded(&place.run(&["model", "pull", "tiny", "--from", &source]));
        place
    }

    /// State of each model, as `model list` reports it.
    fn states(&self) -> Vec<(String, String)> {
        let rows = self.json(&["model", "list", "--json"]);
        let rows = rows.as_array().expect("rows");
        let word = |row: &Value, key: &str| row[key].as_str().expect("text").to_owned();
        rows.iter()
            .map(|row| (word(row, "model"), word(row, "state")))
            .collect()
    }

    fn state(&self) -> String {
        self.states()[0].1.clone()
    }
}

/// Asserts that a command without JSON failed with a reason and a hint.
fn fails(output: &Output, status: i32) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(
        said.contains("error: ") && !said.contains("panicked"),
        "{said}"
    );
}

/// Flips one bit in the middle of the last tensor and keeps the modification time.
fn flip(path: &Path) {
    let modified = fs::metadata(path)
        .and_then(|info| info.modified())
        .expect("a time");
    let mut bytes = fs::read(path).expect("a file");
    let at = bytes.len() - 200;
    bytes[at] ^= 1;
    let mut file = fs::File::options()
        .write(true)
        .open(path)
        .expect("the file");
    file.write_all(&bytes).expect("room");
    file.set_modified(modified).expect("a time");
}

#[test]
fn a_pulled_model_with_a_flipped_bit_is_refused_with_a_hint() {
    let place = Place::pulled();
    assert_eq!(place.state(), "ok");
    flip(&place.file());
    assert_eq!(place.state(), "changed");
    let by_path = place.file();
    let by_path = by_path.to_str().expect("UTF-8");
    // For every way to name the model, and every command that uses it.
    for args in [
        &["chat", "hi", "--local", "--json", "--model", "tiny"][..],
        &["chat", "hi", "--local", "--json", "--model", by_path],
        &words("serve --local --json --http 127.0.0.1:0 --model tiny"),
        &words("--set policy.research.enable=true shard serve --json --layers 0-1 --model tiny"),
        &["model", "verify", "tiny", "--json"],
        // `--accept` does not override the catalogue.
        &["model", "verify", "tiny", "--accept", "--json"],
    ] {
        let output = place.run(args);
        assert_fails(&output, 8, "model_changed");
        let said = text(&output.stderr);
        assert!(said.contains("hearthnet model pull"), "{args:?}: {said}");
    }
    // The failed commands did not accept the changed file.
    assert_eq!(place.state(), "changed");
}

#[test]
fn a_change_of_an_unpinned_file_is_refused_until_it_is_accepted() {
    let place = Place::new();
    let name = &*place.write("own.gguf", &place.bytes);
    let verify =
        |extra: &[&str]| place.run(&[&["model", "verify", name, "--json"], extra].concat());
    let compared = |output: Output| -> String {
        json_output(&output)["compared_with"]
            .as_str()
            .expect("text")
            .to_owned()
    };
    assert_eq!(compared(verify(&[])), "nothing");
    assert_eq!(compared(verify(&[])), "record");
    flip(name.as_ref());
    let local = ["chat", "hi", "--local", "--json", "--model", name];
    for output in [place.run(&local), verify(&[]), place.run(&local)] {
        assert_fails(&output, 8, "model_changed");
        let said = text(&output.stderr);
        assert_contains(&said, &["1 of ", "--accept"]);
    }
    assert_eq!(compared(verify(&["--accept"])), "accepted");
    assert_eq!(compared(verify(&[])), "record");
    // Touched but unchanged: hashed again, and used.
    let touched = fs::File::options().write(true).open(name);
    let touched = touched.expect("the file");
    touched
        .set_modified(std::time::SystemTime::UNIX_EPOCH)
        .expect("a time");
    assert_eq!(compared(verify(&[])), "record");
}

#[test]
fn model_list_shows_whole_truncated_partial_and_missing_files_and_rm_removes_them() {
    let place = Place::new();
    assert_eq!(place.state(), "not_here");
    let place = Place::pulled();
    let file = place.file();
    fs::write(&file, &place.bytes[..place.bytes.len() / 2]).expect("a file");
    assert_eq!(place.state(), "truncated");
    let chat = place.run(&["chat", "hi", "--local", "--json", "--model", "tiny"]);
    assert_fails(&chat, 8, "model_changed");
    assert_complains(&chat, "truncated");

    // Without a terminal there is no confirmation prompt.
    fails(&place.run(&["model", "rm", "tiny"]), 2);
    assert!(file.exists());
    // A file with another name, as parts have, frees nothing.
    let link = place.home.path().join("link.gguf");
    fs::hard_link(&file, &link).expect("a file system with links");
    let removed = place.run(&["model", "rm", "tiny", "--yes"]);
    succeeded(&removed);
    assert_complains(&removed, "no space is freed");
    assert!(!place.models().join("tiny").exists() && link.exists());
    assert_eq!(place.state(), "not_here");
    fails(&place.run(&["model", "rm", "tiny", "--yes"]), 8);

    fs::create_dir_all(place.models().join("tiny")).expect("a folder");
    fs::write(place.models().join("tiny/.tiny.gguf.part"), b"GGUF").expect("a file");
    assert_eq!(place.state(), "partial");
    let own = place.home.path().join("source.gguf");
    let own = own.to_str().expect("UTF-8");
    fails(&place.run(&["model", "rm", own, "--yes"]), 3);
    assert!(
        Path::new(own).exists(),
        "what it has not fetched, it does not remove"
    );
}

/// HTTP server that answers each request with a head and a body. Returns its address.
fn server(mut answer: impl FnMut(&str, &[String]) -> (String, Vec<u8>) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut lines = BufReader::new(stream.try_clone().expect("a handle")).lines();
            let Some(Ok(first)) = lines.next() else {
                continue;
            };
            let headers = lines.map_while(Result::ok).take_while(|l| !l.is_empty());
            let path = first.split(' ').nth(1).unwrap_or_default();
            let (head, body) = answer(path, &headers.collect::<Vec<_>>());
            let head = format!("HTTP/1.1 {head}\r\nConnection: close\r\n\r\n");
            let _ = stream.write_all(&[head.as_bytes(), &body].concat());
        }
    });
    address
}

/// Hub with one file, `o/r/tiny.gguf`, at any revision. Records the requested paths.
fn hub(bytes: Vec<u8>) -> (String, Arc<Mutex<Vec<String>>>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    let address = server(move |path, headers| {
        seen.lock().push(path.to_owned());
        let mut headers = headers.iter();
        let first_byte = headers.any(|h| h.eq_ignore_ascii_case("range: bytes=0-0"));
        let (status, body) = match (path.ends_with("/tiny.gguf"), first_byte) {
            (false, _) => ("404 Not Found".to_owned(), Vec::new()),
            (true, true) => {
                let range = format!("Content-Range: bytes 0-0/{}", bytes.len());
                (
                    format!("206 Partial Content\r\n{range}"),
                    bytes[..1].to_vec(),
                )
            }
            (true, false) => ("200 OK".to_owned(), bytes.clone()),
        };
        (format!("{status}\r\nContent-Length: {}", body.len()), body)
    });
    (address, asked)
}

#[test]
fn a_model_is_fetched_from_the_hub_or_an_address_by_the_name_that_every_command_takes() {
    let place = Place::new();
    let (address, asked) = hub(place.bytes.clone());
    let url = format!("{address}/x/tiny.gguf");
    for name in ["hf:o/r@v2/tiny.gguf", &url] {
        // A missing model: the error names the pull command.
        let chat = place.run(&["chat", "hi", "--local", "--json", "--model", name]);
        assert_fails(&chat, 8, "model_unavailable");
        assert_complains(&chat, &format!("hearthnet model pull {name}"));

        let pulled = place.run_at(&address, &["model", "pull", name]);
        let path = succeeded(&pulled).trim().to_owned();
        assert!(fs::read(&path).expect("the file") == place.bytes);
        succeeded(&place.run(&["model", "inspect", name, "--json"]));
        succeeded(&place.run(&["model", "verify", name]));
    }
    let asked = asked.lock().clone();
    assert!(
        asked.iter().any(|path| path == "/o/r/resolve/v2/tiny.gguf"),
        "{asked:?}"
    );
    let states = place.states();
    assert!(
        states.contains(&("hf:o/r@v2/tiny.gguf".to_owned(), "ok".to_owned())),
        "{states:?}"
    );
    assert_eq!(states.iter().filter(|(_, state)| state == "ok").count(), 2);

    // `--sha256` pins the file.
    let wrong = "0".repeat(64);
    let refused = place.run_at(
        &address,
        &["model", "pull", "hf:o/r/tiny.gguf", "--sha256", &wrong],
    );
    fails(&refused, 8);
    succeeded(&place.run(&["model", "rm", "hf:o/r@v2/tiny.gguf", "--yes"]));
}

#[test]
fn a_failed_pull_says_why_once() {
    let place = Place::new();
    let (address, _) = hub(Vec::new());
    for name in ["hf:o/r/other.gguf", "tiny"] {
        // The hub has no file for the first name; for the second one there is no hub.
        let hub = if name == "tiny" {
            "http://127.0.0.1:1"
        } else {
            &address
        };
        let output = place.run_at(hub, &["model", "pull", name]);
        fails(&output, 8);
        let said = text(&output.stderr);
        assert_eq!(said.matches("not from hf o/r/").count(), 1, "{said}");
        for reason in ["404", "cannot reach"] {
            assert!(said.matches(reason).count() <= 1, "{said}");
        }
        assert!(said.contains("hint: "), "{said}");
    }
}

#[test]
fn a_busy_hub_is_called_busy() {
    let place = Place::new();
    let busy = "429 Too Many Requests\r\nRetry-After: 3600\r\nContent-Length: 0";
    let address = server(move |_, _| (busy.to_owned(), Vec::new()));
    for name in ["tiny", "hf:o/r/tiny.gguf"] {
        let output = place.run_at(&address, &["model", "pull", name]);
        fails(&output, 8);
        assert_complains(&output, "could not be fetched: the server is busy");
        assert_complains(&output, "in 3600 s, as the server asks");
        let said = text(&output.stderr);
        assert!(!said.contains("no source has it"), "{said}");
    }
}

/// Key, and a change of its value.
type Change = (&'static str, fn(&mut Writer, &'static str));

#[test]
fn inspect_gives_the_reason_for_which_chat_refuses_a_file() {
    const PRE: &str = "tokenizer.ggml.pre";
    const BOS: &str = "tokenizer.ggml.bos_token_id";
    const EOS: &str = "tokenizer.ggml.eos_token_id";
    const TYPES: &str = "tokenizer.ggml.token_type";
    const TOKENS: &str = "tokenizer.ggml.tokens";
    const MERGES: &str = "tokenizer.ggml.merges";
    const TEMPLATE: &str = "tokenizer.chat_template";
    let place = Place::new();
    let changes: [Change; 8] = [
        (PRE, |w, key| {
            w.set(key, Metadata::String("no-such")).expect("a key");
        }),
        (PRE, |_, _| ()),
        (BOS, |w, key| {
            w.set(key, Metadata::U32(u32::MAX)).expect("a key");
        }),
        (EOS, |w, key| {
            w.set(key, Metadata::U32(99_999)).expect("a key");
        }),
        (TYPES, |w, key| w.set_i32s(key, &[99; 320]).expect("a key")),
        (TOKENS, |w, key| {
            w.set_strings(key, ["a"; 320]).expect("a key");
        }),
        (MERGES, |w, key| {
            w.set_strings(key, ["no such"]).expect("a key");
        }),
        (TEMPLATE, |w, key| {
            w.set_strings(key, ["{{ 1 }}"]).expect("a key");
        }),
    ];
    let mut files: Vec<Vec<u8>> = changes
        .iter()
        .map(|(key, change)| with_metadata(&place.bytes, &[key], |w| change(w, key)))
        .collect();
    files.push(with_metadata(&place.bytes, &[TEMPLATE], |w| {
        w.set(TEMPLATE, Metadata::String("{% if %}"))
            .expect("a key");
    }));
    files.push(with_nan(&place.bytes, "blk.1.ffn_up.weight"));
    for (index, bytes) in files.iter().enumerate() {
        let name = &*place.write("own.gguf", bytes);
        let _ = fs::remove_file(record_path(name.as_ref()));
        let chat = place.run(&["chat", "hi", "--local", "--model", name]);
        fails(&chat, 8);
        let said = text(&chat.stderr);
        let reason = said.lines().find(|line| line.starts_with("error: "));
        let reason = reason.expect("a reason").rsplit_once(".gguf: ");
        let (_, reason) = reason.expect("the file, and why");
        let inspection = place.run(&["model", "inspect", name]);
        fails(&inspection, 8);
        let (shown, said) = (text(&inspection.stdout), text(&inspection.stderr));
        assert!(
            said.contains(&format!("chat: not with this file: {reason}")),
            "{index}: {reason}\n{said}"
        );
        // The inspection still shows the readable parts.
        assert_contains(&shown, &["weights  ", "not with this file"]);
        let json = place.run(&["model", "inspect", name, "--json"]);
        assert_eq!(json.status.code(), Some(8), "{index}");
        let json: Value = serde_json::from_slice(&json.stdout).expect("JSON");
        assert!(json["weights"].is_string(), "{json}");
        assert_eq!(json["chat_refused"], reason, "{json}");
    }
}

#[test]
fn other_hyperparameters_are_not_reported_as_other_tensors() {
    const KEY: &str = "llama.rope.freq_base";
    let place = Place::new();
    let name = &*place.write("own.gguf", &place.bytes);
    succeeded(&place.run(&["model", "verify", name]));
    let other = with_metadata(&place.bytes, &[KEY], |w| {
        w.set(KEY, Metadata::F32(20_000.0)).expect("a key");
    });
    place.write("own.gguf", &other);
    let refused = place.run(&["model", "verify", name]);
    fails(&refused, 8);
    let said = text(&refused.stderr);
    assert!(
        said.contains("hyperparameters are different") && !said.contains("tensors differ"),
        "{said}"
    );
}

#[test]
fn the_default_model_of_the_configuration_is_used() {
    let place = Place::new();
    let missing = place.run(&words(
        "--set model.default=hf:o/r/tiny.gguf chat hi --local --json",
    ));
    assert_fails(&missing, 8, "model_unavailable");
    assert!(text(&missing.stderr).contains("hf:o/r/tiny.gguf"));
    let none = place.run(&words("--set model.default=no-such chat hi --local --json"));
    assert_fails(&none, 3, "bad_request");
}

#[test]
fn fp32_activations_are_a_model_of_their_own() {
    let (descriptor, said) = check_format("activation_dtype=fp32");
    assert_eq!(descriptor["boundary_dtype"], "fp32");
    assert!(said.contains("fp32 for debugging"), "{said}");
}

#[test]
fn keys_and_values_of_8_bits_are_a_model_of_their_own() {
    let (descriptor, _) = check_format("cache_dtype=q8_0");
    assert_eq!(descriptor["boundary_dtype"], "fp16");
}

/// Checks that a host and a caller with a setting give the answer of one process with it, and that a
/// caller without it refuses the host. Returns the host's descriptor, and what the process complains.
fn check_format(setting: &str) -> (Value, String) {
    let setting = format!("research.distributed_inference.{setting}");
    let set = ["--set", &setting];
    let path = model();
    let caller = Home::new();
    let ask = |extra: &[&str], how: &[&str]| {
        let ask = ["chat", "Name three colours.", "--json", "--model", path];
        let greedy = ["--max-tokens", "12", "--temperature", "0"];
        caller.run(&[&ENABLE[..], how, &ask, &greedy, extra].concat())
    };
    let answer = |output: Output| -> String {
        json_output(&output)["text"]
            .as_str()
            .expect("text")
            .to_owned()
    };
    let host = host(&caller, "0-29", &set);
    let address = &host.address;

    let alone = ask(&["--local"], &set);
    let said = text(&alone.stderr);
    let over = ask(&["--shard", address, "--no-fallback"], &set);
    assert_eq!(answer(over), answer(alone));
    let other = ask(&["--shard", address, "--no-fallback"], &[]);
    assert!(
        matches!(other.status.code(), Some(4 | 6)),
        "{}",
        text(&other.stderr)
    );
    (host.process.ready["descriptor"].clone(), said)
}

#[test]
fn a_host_shuts_down_when_its_terminal_closes_unless_run_by_nohup() {
    use rustix::process::Signal;
    let own = Home::new();
    let mut host = host(&own, "0-1", &[]);
    let end = host.process.end(Signal::HUP);
    assert!(end.success(), "{end:?}");

    // `nohup` ignores SIGHUP, so the host runs until it is asked to end.
    let mut command = std::process::Command::new("nohup");
    let kept = words("serve --local --json --http 127.0.0.1:0 --model");
    let kept = own.hearthnet(&[&kept[..], &[model()]].concat());
    wrap(&mut command, &kept);
    let mut kept = Server::run(&mut command);
    kept.signal(Signal::HUP);
    // It still answers.
    http::get(&http::address(&kept), "/healthz");
    assert!(kept.end(Signal::TERM).success());
}

/// Tiny model directory in Hugging Face's format, and the file that llama.cpp's converter makes of
/// it.
fn hugging_face(name: &str) -> (String, String) {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/hearthnet-files/tests/data");
    let path = |part: String| data.join(part).to_str().expect("UTF-8").to_owned();
    (
        path(format!("hugging_face/{name}")),
        path(format!("families/{name}.gguf")),
    )
}

#[test]
fn a_hugging_face_directory_is_accepted_wherever_a_model_is_named() {
    let place = Place::new();
    let (directory, converted) = hugging_face("mixtral");
    let weights = |args: &[&str]| {
        // These models have no tokenizer: `chat` refuses them, a host serves them.
        let output = place.run(&[&["model", "inspect", "--json"][..], args].concat());
        assert_eq!(output.status.code(), Some(8), "{}", text(&output.stderr));
        let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        told["weights"].as_str().expect("an id").to_owned()
    };
    // Weights identity: equal to the converted file, different when quantised.
    assert_eq!(weights(&[&directory]), weights(&[&converted]));
    let quantised = weights(&[&directory, "--quantize", "q8_0"]);
    assert_ne!(quantised, weights(&[&directory]));
    let states = place.states();
    let read = |(name, state): &&(String, String)| name.contains("/dir/") && state != "not here";
    assert_eq!(states.iter().filter(read).count(), 2, "{states:?}");

    // `import` writes the same file to the target, but never over an existing one.
    let target = place.home.path().join("mixtral.gguf");
    let out = target.to_str().expect("UTF-8");
    let import = ["model", "import", &directory, "-o", out];
    let import = [&import[..], &["--quantize", "q8_0"]].concat();
    let imported = place.run(&import);
    assert_eq!(succeeded(&imported).trim(), out);
    assert_eq!(weights(&[out]), quantised);
    fails(&place.run(&import), 2);
    // `convert` writes the same file.
    let other = place.home.path().join("converted.gguf");
    let other = other.to_str().expect("UTF-8");
    succeeded(&place.run(&["model", "convert", &converted, "--to", "q8_0", "-o", other]));
    assert_eq!(weights(&[other]), quantised);

    // The second import writes nothing.
    let again = place.run(&["model", "import", &directory]);
    assert!(again.status.success() && !text(&again.stderr).contains("reading"));
    let line = text(&again.stdout).trim().to_owned();
    assert!(
        Path::new(&line).starts_with(place.models().join("dir")),
        "{line}"
    );
    succeeded(&place.run(&["model", "rm", "--yes", &line]));
}

#[test]
fn an_invalid_model_directory_is_reported_and_leaves_no_files() {
    let place = Place::new();
    let copy = place.home.path().join("broken");
    fs::create_dir(&copy).expect("a directory");
    let (directory, converted) = hugging_face("llama31");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(Path::new(&directory).join(file), copy.join(file)).expect("a file");
    }
    let weights = copy.join("model.safetensors");
    let bytes = fs::read(&weights).expect("a file");
    fs::write(&weights, &bytes[..bytes.len() - 100]).expect("a file");
    let broken = copy.to_str().expect("UTF-8");
    let refused = place.run(&["model", "inspect", broken]);
    fails(&refused, 8);
    assert!(text(&refused.stderr).contains("cut off"));
    let config = fs::read_to_string(copy.join("config.json")).expect("a file");
    let config = config.replace("LlamaForCausalLM", "LlamaNineForCausalLM");
    fs::write(copy.join("config.json"), config).expect("a file");
    let refused = place.run(&["bench", "engine", "--model", broken]);
    fails(&refused, 8);
    assert!(text(&refused.stderr).contains("LlamaNineForCausalLM"));
    fs::remove_file(copy.join("config.json")).expect("a file");
    let refused = place.run(&["model", "import", broken]);
    fails(&refused, 8);
    assert!(text(&refused.stderr).contains("no config.json"));
    assert!(!place.models().join("dir").is_dir());

    // `--quantize` applies to directories only.
    fails(
        &place.run(&["model", "inspect", &converted, "--quantize", "q8_0"]),
        3,
    );
    fails(
        &place.run(&["model", "inspect", &directory, "--quantize", "q9_0"]),
        2,
    );
}

#[test]
fn a_model_without_a_catalogue_pin_is_pinned_by_its_first_pull() {
    let place = Place::with_pins(false);
    let digest = Digest::of(&place.bytes).to_string();
    let (address, _) = hub(place.bytes.clone());
    // The name is case-insensitive, and the licence is shown first.
    let pulled = place.run_at(&address, &["model", "pull", "Tiny"]);
    let said = text(&pulled.stderr);
    assert!(pulled.status.success(), "{said}");
    let licence = said.find("the user of the model accepts https://example.org/terms");
    assert!(
        licence.is_some() && licence < said.find("pulling Tiny"),
        "{said}"
    );
    assert!(said.contains(&digest), "{said}");
    let listed = |key: &str| place.json(&["model", "list", "--json"])[0][key].clone();
    assert_eq!(listed("sha256"), *digest);
    assert_eq!(
        (listed("pinned"), listed("state")),
        ("first_pull".into(), "ok".into())
    );
    assert!(listed("weights").is_string() && listed("runs_here").is_boolean());
    assert!(listed("text").is_string());

    // The pin outlives the file: another file of the same size is refused, and both digests are
    // shown.
    succeeded(&place.run(&["model", "rm", "tiny", "--yes"]));
    let mut other = place.bytes.clone();
    let at = other.len() - 200;
    other[at] ^= 1;
    let (replaced, _) = hub(other.clone());
    let refused = place.run_at(&replaced, &["model", "pull", "tiny"]);
    fails(&refused, 8);
    let said = text(&refused.stderr);
    assert_contains(
        &said,
        &[&digest, &Digest::of(&other).to_string(), "pins/tiny.toml"],
    );
    assert!(!place.file().exists());
    succeeded(&place.run_at(&address, &["model", "pull", "tiny"]));

    flip(&place.file());
    for args in [
        &["model", "verify", "tiny", "--json"][..],
        &["model", "verify", "tiny", "--accept", "--json"],
    ] {
        let changed = place.run(args);
        assert_fails(&changed, 8, "model_changed");
        let said = text(&changed.stderr);
        assert!(said.contains("differs from the first download"), "{said}");
    }

    // An unreadable pin is an error.
    fs::write(place.models().join("pins/tiny.toml"), "").expect("a file");
    fails(&place.run(&["model", "list"]), 13);
}

#[test]
fn an_unknown_model_gets_suggestions_and_a_gated_repository_a_hint() {
    let place = Place::new();
    let output = place.run(&["model", "inspect", "tinny"]);
    fails(&output, 3);
    assert_complains(&output, "did you mean tiny");

    let gated = "401 Unauthorized\r\nContent-Length: 0";
    let address = server(move |_, _| (gated.to_owned(), Vec::new()));
    for name in ["tiny", "hf:o/r/tiny.gguf"] {
        let output = place.run_at(&address, &["model", "pull", name]);
        fails(&output, 8);
        let said = text(&output.stderr);
        assert_contains(&said, &["HF_TOKEN", "https://huggingface.co/o/r"]);
    }
}

#[test]
fn a_split_model_is_chatted_with_and_served_like_the_joined_file() {
    let home = Home::new();
    let tiny = TinyLlama::default();
    let whole = tiny.write(home.path());
    let parts = write_split(home.path(), &split(&tiny.bytes(), 3));
    let [whole, parts] = [&whole, &parts].map(|path| path.to_str().expect("UTF-8"));
    let greedy = words("--max-tokens 12 --temperature 0.9 --raw --json");
    let chat = |model: &str, seed: &str| -> Value {
        let local = [
            "chat", "Vienna", "--local", "--model", model, "--seed", seed,
        ];
        home.json(&[&local[..], &greedy].concat())
    };
    // With random weights, any token may end an answer.
    let is_long = |answer: &Value| answer["token_ids"].as_array().expect("tokens").len() > 4;
    let seeds: Vec<String> = (1..30).map(|seed| seed.to_string()).collect();
    let mut answers = seeds.iter().map(|seed| (seed, chat(whole, seed)));
    let (seed, expected) = answers
        .find(|(_, answer)| is_long(answer))
        .expect("a long answer");
    assert_eq!(chat(parts, seed)["token_ids"], expected["token_ids"]);

    // Hosts of its layers.
    let id = home.node_id();
    let start = |layers| Host::start(&Home::new(), parts, layers, &id, &[]);
    let hosts = ["0-0", "1-1"].map(start);
    let own = ["--model", parts, "--seed", seed, "--private-first", "0"];
    let extra = [&own[..], &words("--max-tokens 12 --temperature 0.9 --raw")].concat();
    let split = json_output(&home.ask("Vienna", &hosts.each_ref(), &extra));
    assert_eq!(split["token_ids"], expected["token_ids"]);

    // The HTTP interface.
    let service = Server::api(&home, &[], parts, &["--local"]);
    let body = json!({
        "model": service.ready["models"][0], "prompt": "Vienna", "max_tokens": 12,
        "temperature": 0.9, "seed": seed.parse::<u64>().expect("a number"),
    });
    let (status, answer) = http::post_json(&http::address(&service), "/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["text"], expected["text"]);
}
