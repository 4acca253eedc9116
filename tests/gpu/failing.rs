//! Cards that fail, in the program. The driver is `driver.c`: Mesa's in software, with a fault.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::{PROMPT, SAMPLING, local, refusal, software};
use crate::support::community::founded_bare;
use crate::support::*;

/// Folder in which Debian, and others, name the drivers.
const MANIFESTS: &str = "/usr/share/vulkan/icd.d";

/// The driver with its fault.
struct Driver {
    dir: tempfile::TempDir,
    fault: &'static str,
    below: PathBuf,
    manifest_below: PathBuf,
}

impl Driver {
    fn new(fault: &'static str) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let library = dir.path().join("driver.so");
        let built = Command::new("cc")
            .args(["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-shared", "-fPIC"])
            .args(["-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&library)
            .arg(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../tests/gpu/driver.c"
            ))
            .arg("-ldl")
            .output()
            .expect("a C compiler");
        assert!(built.status.success(), "{}", text(&built.stderr));
        let files = std::fs::read_dir(MANIFESTS).expect("drivers").flatten();
        let mut files = files.map(|file| file.path());
        let is_software = |path: &PathBuf| path.to_string_lossy().contains("/lvp_icd.");
        let manifest_below = files.find(is_software).expect("Mesa's driver in software");
        let mut manifest = read(&manifest_below);
        let below = manifest["ICD"]["library_path"]
            .as_str()
            .expect("a path")
            .into();
        manifest["ICD"]["library_path"] = library.to_str().expect("a UTF-8 path").into();
        let own = dir.path().join("driver.json");
        std::fs::write(own, manifest.to_string()).expect("a manifest");
        Self {
            dir,
            fault,
            below,
            manifest_below,
        }
    }

    fn gone(&self) -> PathBuf {
        self.dir.path().join("gone")
    }

    /// Lets the card fail now.
    fn fail(&self) {
        std::fs::write(self.gone(), "").expect("a file");
    }

    /// Environment of a machine with this card, after one without a fault if `both`.
    fn environment(&self, both: bool) -> Vec<(&'static str, String)> {
        let path = |path: &Path| path.to_str().expect("a UTF-8 path").to_owned();
        let mut drivers = path(&self.dir.path().join("driver.json"));
        if both {
            drivers = format!("{}:{drivers}", path(&self.manifest_below));
        }
        vec![
            ("VK_DRIVER_FILES", drivers.clone()),
            // For loaders before 1.3.234.
            ("VK_ICD_FILENAMES", drivers),
            ("DRIVER_BELOW", path(&self.below)),
            ("DRIVER_FAULT", self.fault.to_owned()),
            ("DRIVER_GONE", path(&self.gone())),
        ]
    }

    /// Host on a machine with this card, and one without a fault if `both`.
    fn host_with(&self, home: &Home, layers: &str, how: &[&str], both: bool) -> Host {
        let environment = self.environment(both);
        let (own, id) = (Home::new(), home.node_id());
        Host::start_with(&own, model(), layers, &id, how, &borrowed(&environment))
    }

    /// As [`Self::host_with`], on a device.
    fn host(&self, home: &Home, layers: &str, device: &str, both: bool) -> Host {
        self.host_with(home, layers, &["--device", device], both)
    }

    fn refusal(&self, home: &Home, device: &str, both: bool) -> String {
        refusal(home, device, &borrowed(&self.environment(both)))
    }
}

fn borrowed<'a>(environment: &'a [(&'a str, String)]) -> Vec<(&'a str, &'a str)> {
    let variables = environment.iter();
    variables
        .map(|(name, value)| (*name, value.as_str()))
        .collect()
}

fn read(path: &Path) -> Value {
    let bytes = std::fs::read(path).expect("a file");
    serde_json::from_slice(&bytes).expect("JSON")
}

/// Answer of hosts alone.
fn answer(home: &Home, hosts: &[&Host]) -> Value {
    let extra = [&words(SAMPLING)[..], &["--no-fallback"]].concat();
    json_output(&home.ask(PROMPT, hosts, &extra))
}

/// Asks hosts of all layers, and lets the card fail after some tokens. Its host ends the stream with
/// this code. This machine takes over, or the host's processor.
fn assert_failure_costs_no_byte(
    home: &Home,
    hosts: &[&Host],
    driver: &Driver,
    (code, expected): (&str, &Value),
) {
    let all = shards(hosts.iter().map(|host| &host.address));
    let ask = ["chat", PROMPT, "--frames"];
    let args = [&ENABLE[..], &ask, &words(SAMPLING), &all].concat();
    let frames = frames(&mut home.hearthnet(&args), 8, |_| driver.fail());
    let done = told(&frames, "done")[0];
    assert_eq!(done["token_ids"], expected["token_ids"]);
    assert_eq!(done["text"], expected["text"]);
    let told = told(&frames, "shard_status");
    let failures = told.iter().filter(|host| host["status"] == "degraded");
    let failures: Vec<_> = failures.map(|host| &host["code"]).collect();
    assert_eq!(failures, [code]);
}

#[test]
fn a_card_with_too_small_buffers_is_refused_in_one_sentence_and_auto_uses_the_processor() {
    let (driver, home) = (Driver::new("small"), Home::new());
    let why = driver.refusal(&home, "gpu", false);
    let limit =
        "the driver of Test card allows 67108864 bytes in a buffer, but 134217728 are needed";
    assert!(why.contains(limit), "{why}");
    let auto = driver.host(&home, "10-19", "auto", false);
    assert!(!software(&auto).contains(" card/"), "{}", software(&auto));
}

#[test]
fn a_driver_that_hangs_is_told_in_one_sentence_and_auto_uses_the_processor() {
    let (driver, (home, _node)) = (Driver::new("hangs"), founded_bare());
    let sentence = "the driver of the graphics card did not answer within 20 s";
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| driver.refusal(&home, "gpu", false));
        let auto = scope.spawn(|| driver.host(&home, "10-19", "auto", false));
        let mut command = home.hearthnet(&["diagnose"]);
        command
            .stderr(Stdio::piped())
            .envs(driver.environment(false));
        let diagnosed = text(&command.output().expect("it ran").stderr);
        assert_contains(
            &diagnosed,
            &[&format!("graphics card here: not used, {sentence}")],
        );
        let why = refused.join().expect("its end");
        assert!(why.contains(sentence), "{why}");
        let auto = auto.join().expect("a host");
        assert!(!software(&auto).contains(" card/"), "{}", software(&auto));
    });
}

#[test]
fn auto_uses_a_card_only_if_it_is_faster() {
    let (driver, home) = (Driver::new("none"), Home::new());
    // The card computes on the processor, by way of a compiler of shaders.
    let auto = driver.host(&home, "10-19", "auto", false);
    assert!(!software(&auto).contains(" card/"), "{}", software(&auto));
    let chosen = driver.host(&home, "10-19", "gpu", false);
    assert!(
        software(&chosen).contains(" card/Test-card"),
        "{}",
        software(&chosen)
    );
}

#[test]
fn of_two_cards_one_disappears_in_an_answer_and_its_bytes_stay() {
    let (driver, home) = (Driver::new("leaves"), Home::new());
    let expected = local(&home);
    let first = host(&home, "0-9", &["--device", "cpu"]);
    let second = driver.host(&home, "10-19", "gpu:0", true);
    let third = driver.host(&home, "20-29", "gpu:1", true);
    let is_failing = |host: &Host| software(host).contains(" card/Test-card");
    assert_ne!(is_failing(&second), is_failing(&third));
    let all = [&first, &second, &third];
    assert_failure_costs_no_byte(&home, &all, &driver, ("internal", &expected));
    // The host of the lost card goes on with its processor, and the other one with its card.
    let again = answer(&home, &all);
    assert_eq!(again["token_ids"], expected["token_ids"]);
    // A host that starts now finds one card.
    let why = driver.refusal(&home, "gpu:1", true);
    assert_contains(&why, &["there is no graphics card 1 on this machine"]);
    let left = driver.host(&home, "10-19", "gpu:0", true);
    assert!(software(&left).contains(" card/") && !is_failing(&left));
}

#[test]
fn a_card_that_stands_still_in_an_answer_costs_no_byte() {
    let (driver, home) = (Driver::new("stands"), Home::new());
    let expected = local(&home);
    let first = host(&home, "0-9", &["--device", "cpu"]);
    let second = driver.host(&home, "10-29", "gpu:0", false);
    assert!(software(&second).contains(" card/Test-card"));
    let failure = ("pipeline_stalled", &expected);
    assert_failure_costs_no_byte(&home, &[&first, &second], &driver, failure);
    // Within a minute the host gives the card up, and goes on with its processor.
    let again = answer(&home, &[&first, &second]);
    assert_eq!(again["token_ids"], expected["token_ids"]);
}

#[test]
fn a_card_without_room_for_all_layers_computes_some_and_the_processor_the_others() {
    let home = Home::new();
    let expected = local(&home);
    for fault in ["full", "shared"] {
        let driver = Driver::new(fault);
        // 30 layers take 63 MiB. Keys and values get their share of the card's memory.
        let kv = "research.distributed_inference.host.kv_budget_mb=16";
        let how = ["--device", "gpu", "--set", kv];
        let all = driver.host_with(&home, "0-29", &how, false);
        let both = software(&all).contains(" card/Test-card-(integers)-and-the-processor");
        assert!(both, "{fault}: {}", software(&all));
        let found = answer(&home, &[&all]);
        assert_eq!(found["token_ids"], expected["token_ids"], "{fault}");
    }
}
