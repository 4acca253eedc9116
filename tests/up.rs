//! `hearthnet up` without a terminal: founding, joining with an empty disk, resuming, and the
//! models that a community adopts and drops.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_files::spec::CacheDtype;
use hearthnet_testkit::TinyLlama;
use serde_json::{Value, json};

use crate::support::up::{Household, Up, medium};
use crate::support::*;

const QUESTION: [&str; 4] = [
    "chat",
    "Name three colours.",
    "--temperature=0",
    "--max-tokens=24",
];
/// Memory for all layers of the models here, in MiB.
const ALL: u32 = 512;

/// Model of six layers, about 4 MB.
fn small_model(home: &Home) -> PathBuf {
    let model = TinyLlama {
        layers: 6,
        width: 256,
        head_dim: 64,
        ffn: 768,
        ..TinyLlama::default()
    };
    model.write(home.path())
}

/// Founder that runs, and its model file.
fn founded(memory: u32) -> (Household, Up, PathBuf) {
    let founder = Household::new(memory, &[]);
    let file = small_model(&founder.home);
    let up = founder.up(&found(&file));
    (founder, up, file)
}

fn found(file: &Path) -> [&str; 4] {
    ["--found", "Elm", "--model", file.to_str().expect("UTF-8")]
}

/// Answer of the hosts of the community.
fn together(home: &Household) -> String {
    let ask = [&QUESTION[..], &["--no-fallback"]].concat();
    succeeded(&until_answered(|| home.run(&ask)))
}

/// Bytes of a home's part that it had to fetch. Asserts that it holds no other pieces.
fn needed(home: &Household, (lo, hi): (u32, u32)) -> u64 {
    let part = home.part().expect("a part");
    let table = part.table();
    // The chat's private layers are 0 and 1.
    let wanted = [
        table.of_head(),
        table.of_layers(0, 1),
        table.of_layers(lo, hi),
    ];
    let sorted = |pieces: Vec<_>| pieces.into_iter().flatten().collect::<BTreeSet<u32>>();
    assert_eq!(sorted(part.held()), sorted(wanted.concat()), "{lo}-{hi}");
    let identity = part.identity();
    let objects = identity.head_bytes + identity.manifest_bytes + table.list().len() as u64;
    table.bytes(&part.held()) + objects
}

/// Share of a model's file that a home's part takes on the disk, in per cent.
fn share(home: &Household) -> u64 {
    let part = home.part().expect("a part");
    part.disk_bytes() * 100 / part.identity().file_bytes
}

#[test]
fn homes_with_empty_disks_fetch_only_their_parts_and_answer_as_the_whole_file() {
    let file = Path::new(model());
    let attic = Household::new(ALL, &[]);
    let first = attic.up(&found(file));
    assert_eq!(attic.until_serving(&first), (0, 14));
    let bakery = Household::new(ALL, &[&first.address]);
    let second = bakery.up(&["--join", first.code()]);
    let range = bakery.until_serving(&second);
    assert_eq!(range, (15, 29));
    // Memory for five layers or so.
    let cellar = Household::new(12, &[&first.address, &second.address]);
    let third = cellar.up(&["--join", first.code()]);
    let (lo, hi) = cellar.until_serving(&third);
    assert!(hi - lo < 8, "{lo}-{hi}");

    let needed = needed(&bakery, range) + needed(&cellar, (lo, hi));
    let sent = [&first, &second, &third].map(Up::sent);
    let shares = [&bakery, &cellar].map(share);
    eprintln!("needed {needed}, sent {sent:?}, {shares:?} % of the file on the disks");
    let all: u64 = sent.iter().sum();
    assert!(
        all >= needed && all * 100 <= needed * 102,
        "{all} for {needed}"
    );
    // A third of this model is its embedding.
    assert!(shares[0] < 75 && shares[1] < 55, "{shares:?}");

    // The attic has all layers on its disk and serves a half; the bakery has the private ones as well.
    let held = |home: &Household| {
        let rows = cellar.json(&["model", "list", "--json"]);
        let mut rows = rows.as_array().into_iter().flatten();
        let row = rows.find(|row| row["adopted"] == true)?.clone();
        let node = home.home.node_id();
        let mut all = row["held"].as_array().into_iter().flatten();
        Some(all.find(|it| it["node"] == node.as_str())?["layers"].clone())
    };
    until("the list names what others hold", || {
        held(&attic) == Some(json!([[0, 29]])) && held(&bakery) == Some(json!([[0, 1], [15, 29]]))
    });

    let alone = attic.alone(&QUESTION, file);
    for home in [&bakery, &cellar] {
        assert_eq!(together(home), alone);
    }
}

#[test]
fn layers_of_a_killed_home_are_served_by_a_spare_one_within_seconds() {
    let (attic, first, file) = founded(ALL);
    assert_eq!(attic.until_serving(&first), (0, 2));
    let bakery = Household::new(ALL, &[&first.address]);
    let second = bakery.up(&["--join", first.code()]);
    assert_eq!(bakery.until_serving(&second), (3, 5));
    let cellar = Household::new(ALL, &[&first.address, &second.address]);
    let third = cellar.up(&["--join", first.code()]);
    let spare = cellar.until_serving(&third);
    assert_eq!(spare, (0, 1));
    until("all homes are linked", || {
        let status = cellar.json(&["status", "--json"]);
        let peers = status["node"]["running"]["peers"].as_array().cloned();
        let peers = peers.unwrap_or_default().into_iter();
        peers.filter(|peer| peer["connected"] == true).count() == 2
    });

    second.kill();
    third.until("it serves other layers", Duration::from_secs(30), || {
        cellar.serving().is_some_and(|range| range != spare)
    });
    // Before it withdrew its layers, it fetched those of the killed home.
    let said = third.said();
    let (fetched, left) = (said.rfind("fetched "), said.rfind("moving to layers"));
    assert!(fetched.is_some() && fetched < left, "{said}");
    assert_eq!(together(&attic), attic.alone(&QUESTION, &file));
}

#[test]
fn the_cache_that_the_founder_chose_is_that_of_all_homes() {
    let attic = Household::new(ALL, &[]).with("research.distributed_inference.cache_dtype=q8_0");
    let file = medium(6).write(attic.home.path());
    let first = attic.up(&found(&file));
    attic.until_serving(&first);
    let cellar = Household::new(ALL, &[&first.address]);
    let second = cellar.up(&["--join", first.code()]);
    assert_eq!(cellar.until_serving(&second), (3, 5));
    for home in [&attic, &cellar] {
        let part = Arc::new(home.part().expect("a part"));
        let spec = part.model_file().expect("a model").spec().clone();
        assert_eq!(spec.attention.cache, CacheDtype::Q8_0);
        assert_eq!(together(home), attic.alone(&QUESTION, &file));
    }
}

#[test]
fn a_founder_whose_neighbour_is_killed_serves_all_layers_of_its_file_and_answers_alone() {
    let (attic, first, file) = founded(ALL);
    assert_eq!(attic.until_serving(&first), (0, 2));
    let cellar = Household::new(ALL, &[&first.address]);
    let second = cellar.up(&["--join", first.code()]);
    assert_eq!(cellar.until_serving(&second), (3, 5));

    second.kill();
    first.until("it serves all layers", TIMEOUT, || {
        attic.serving() == Some((0, 5))
    });
    assert_eq!(together(&attic), attic.alone(&QUESTION, &file));
}

#[test]
fn a_home_that_is_left_alone_fetches_the_other_layers_when_it_has_a_source_and_keeps_all() {
    let (attic, first, file) = founded(ALL);
    let cellar = Household::new(ALL, &[&first.address]);
    let drive = cellar.home.path().join("drive");
    std::fs::create_dir(&drive).expect("a folder");
    let copy = drive.join(file.file_name().expect("a name"));
    std::fs::copy(&file, &copy).expect("a copy");
    attic.until_serving(&first);
    let from = drive.to_str().expect("UTF-8");
    let second = cellar.up(&["--join", first.code(), "--from", from]);
    assert_eq!(cellar.until_serving(&second), (3, 5));

    // No source has layer 2 until the drive is back.
    let away = cellar.home.path().join("away.gguf");
    std::fs::rename(&copy, &away).expect("the copy");
    let address = first.address.clone();
    first.kill();
    second.until("it says what is missing", TIMEOUT, || {
        second.said().contains("no source has the missing")
    });
    // The page tells it as well.
    let waiting = || cellar.running()["waiting"].clone();
    second.until("the page tells why", TIMEOUT, || {
        let told = waiting();
        let mut codes = told.as_object().into_iter().flat_map(|all| all.values());
        codes.any(|code| code == "no_source")
    });
    assert_eq!(cellar.serving(), Some((3, 5)));
    std::fs::rename(&away, &copy).expect("the copy");
    second.until("it serves all layers", TIMEOUT, || {
        cellar.serving() == Some((0, 5))
    });
    second.until("nothing waits", TIMEOUT, || waiting() == json!({}));
    assert_eq!(together(&cellar), cellar.alone(&QUESTION, &copy));

    let first = attic.up_at(&address, &[]);
    assert_eq!(attic.until_serving(&first), (0, 2));
    assert_eq!(cellar.serving(), Some((0, 5)));
}

#[test]
fn a_later_up_asks_nothing_and_serves_again_without_fetching() {
    let (attic, first, _) = founded(ALL);
    let cellar = Household::new(ALL, &[&first.address]);
    let second = cellar.up(&["--join", first.code()]);
    let range = cellar.until_serving(&second);
    let sent = first.sent();
    assert!(sent > 0);
    second.stop();
    let second = cellar.up(&[]);
    assert_eq!(cellar.until_serving(&second), range);
    assert_eq!(first.sent(), sent);
    // So does the founder.
    let address = first.address.clone();
    first.stop();
    let first = attic.up_at(&address, &[]);
    assert!(first.code.is_none());
    let name = std::fs::read_to_string(format!("/proc/{}/comm", first.child.id()));
    assert_eq!(name.expect("it runs"), "hearthnet\n");
    attic.until_serving(&first);
    assert_eq!(together(&cellar), together(&attic));
}

#[test]
fn up_without_a_terminal_and_without_answers_names_the_flags() {
    let home = Household::new(ALL, &[]);
    let output = home.run(&["up", "--no-open"]);
    assert!(!output.status.success());
    for words in ["no community", "--found NAME", "--join CODE"] {
        assert_complains(&output, words);
    }
    // The failed `up` has made no node that a later one would resume.
    let again = home.run(&["up", "--no-open"]);
    assert_complains(&again, "--found NAME");
}

#[test]
fn up_beside_a_running_daemon_prints_its_addresses() {
    let (attic, first, _) = founded(ALL);
    let output = attic.run(&["up", "--no-open", "--join", "hearth1another"]);
    let said = succeeded(&output);
    assert_contains(&said, &[&first.address, &first.http]);
    // A code of another community is not ignored in silence.
    assert_complains(&output, "--join without effect");
}

#[test]
fn a_plan_for_a_model_of_the_catalogue_that_no_home_has_is_estimated_from_a_measured_one() {
    let (attic, first, file) = founded(ALL);
    let plan = ["plan", "smollm2-135m-instruct"];
    let json = [&plan[..], &["--json"]].concat();
    until("the home has measured its model", || {
        attic.run(&json).status.success()
    });
    let told = attic.json(&json);
    let measured = name(file.to_str().expect("UTF-8"));
    assert_eq!(told["estimated_from"], measured.as_str());
    assert_eq!(told["nodes"][0]["layers"], json!([2, 29]));
    let said = succeeded(&attic.run(&plan));
    let estimate = format!("sizes from the catalogue, times from those of {measured}");
    assert_contains(&said, &[&estimate, "tokens/s"]);
    drop(first);
}

/// Folder with programs `names` that write their arguments to the file `calls` beside them.
fn fake_programs(home: &Home, names: &[&str]) -> PathBuf {
    let dir = home.path().join("programs");
    std::fs::create_dir(&dir).expect("a folder");
    for name in names {
        let path = dir.join(name);
        let script = format!("#!/bin/sh\necho {name} \"$@\" >> {}/calls\n", dir.display());
        std::fs::write(&path, script).expect("a program");
        chmod(&path, 0o755);
    }
    dir
}

#[test]
fn up_at_boot_writes_and_enables_a_unit_that_resumes_this_home_and_keeps_one_of_the_user() {
    let (attic, first, _) = founded(ALL);
    let programs = fake_programs(&attic.home, &["systemctl", "loginctl"]);
    let at_boot = |programs: &Path| {
        let mut command = attic.command(&["up", "--no-open", "--at-boot"]);
        let config = attic.home.path().join("config");
        let output = command
            .env("PATH", programs)
            .env("XDG_CONFIG_HOME", config)
            .output();
        let output = output.expect("hearthnet starts");
        // Beside the running node it only prints the addresses.
        assert_contains(&succeeded(&output), &[&first.address]);
        text(&output.stderr)
    };
    let said = at_boot(&programs);
    assert_contains(&said, &["starts this node at every boot"]);
    let calls = || std::fs::read_to_string(programs.join("calls")).expect("calls");
    let expected = "systemctl --user daemon-reload\nsystemctl --user enable hearthnet.service\n\
                    loginctl enable-linger\n";
    assert_eq!(calls(), expected);
    let unit = attic
        .home
        .path()
        .join("config/systemd/user/hearthnet.service");
    let written = std::fs::read_to_string(&unit).expect("a unit");
    let start = written.lines().find(|line| line.starts_with("ExecStart="));
    let start = start.expect("a command");
    assert!(start.ends_with("\"up\" \"--no-open\""), "{start}");
    assert_contains(start, &["/hearthnet\" ", "\"discovery.mdns=false\""]);
    assert_contains(
        &written,
        &["\nNoNewPrivileges=yes\n", "\nWantedBy=default.target\n"],
    );

    std::fs::write(&unit, "of the user").expect("a unit");
    assert_contains(&at_boot(&programs), &["is kept as it is"]);
    assert_eq!(
        std::fs::read_to_string(&unit).expect("a unit"),
        "of the user"
    );
    assert_eq!(calls(), expected.repeat(2));

    // A system without systemd.
    let nothing = attic.home.path().join("nothing");
    assert_contains(
        &at_boot(&nothing),
        &["does not start at boot", "no systemctl"],
    );
}

/// Code in the JSON object of a command that fails.
fn code_of(output: &Output) -> Value {
    let said = text(&output.stdout);
    let line = said.lines().last().unwrap_or_default();
    let said: Value = serde_json::from_str(line).unwrap_or_default();
    assert!(!output.status.success(), "{said}");
    said["error"]["code"].clone()
}

#[test]
fn only_anchors_choose_models() {
    let (attic, first, file) = founded(ALL);
    let cellar = Household::new(ALL, &[&first.address]);
    let second = cellar.up(&["--join", first.code()]);
    cellar.until_serving(&second);
    let file = file.to_str().expect("UTF-8");
    for change in [["model", "adopt", file], ["model", "drop", &name(file)]] {
        let output = cellar.run(&[&change[..], &["--json"]].concat());
        assert_eq!(code_of(&output), "unauthorized", "{}", text(&output.stderr));
    }
    // An unknown model.
    let output = attic.run(&["model", "drop", "nothing", "--json"]);
    assert_eq!(code_of(&output), "model_unknown");
    drop(first);
}

/// Name of an adopted file.
fn name(file: &str) -> String {
    let stem = Path::new(file).file_stem().expect("a name");
    stem.to_str().expect("UTF-8").to_owned()
}

/// Random model of four layers, of 11 MiB each.
fn medium_model(home: &Home, seed: u64) -> PathBuf {
    let model = TinyLlama { seed, ..medium(4) };
    model.write(home.path())
}

#[test]
fn two_homes_hold_half_of_each_of_two_models_and_answer_both() {
    // Memory for two layers of each model.
    let memory = 48;
    let attic = Household::new(memory, &[]).holding(0);
    let files = [1, 2].map(|seed| medium_model(&attic.home, seed));
    let names = files
        .each_ref()
        .map(|file| name(file.to_str().expect("UTF-8")));
    let until_both = |home: &Household, up: &Up, lo: u32| {
        let halves = names
            .each_ref()
            .map(|name| format!("{name}:{lo}-{}", lo + 1));
        let what = format!("{halves:?} are served");
        up.until(&what, TIMEOUT, || home.shards() == halves);
    };
    let first = attic.up(&found(&files[0]));
    attic.until_serving(&first);
    let other_file = files[1].to_str().expect("UTF-8");
    attic.json(&["model", "adopt", other_file, "--json"]);
    until_both(&attic, &first, 0);
    // Its layers of the first model fit into the new share, and stay.
    let said = first.said();
    assert!(!said.contains("stopping: "), "{said}");
    let cellar = Household::new(memory, &[&first.address]).holding(0);
    let second = cellar.up(&["--join", first.code()]);
    until_both(&cellar, &second, 2);

    for (file, name) in files.iter().zip(&names) {
        let file = file.to_str().expect("UTF-8");
        let local = ["--local", "--json", "--model", file];
        let alone = attic.json(&[&QUESTION[..], &local].concat());
        for (home, other) in [(&attic, &cellar), (&cellar, &attic)] {
            let ask = ["--no-fallback", "--json", "--model", name.as_str()];
            let ask = [&QUESTION[..], &ask].concat();
            let said = succeeded(&until_answered(|| home.run(&ask)));
            let answer: Value = serde_json::from_str(&said).expect("JSON");
            assert_eq!(answer["text"], alone["text"]);
            let mut route = answer["route"].as_array().expect("a route").iter();
            let other = other.home.node_id();
            assert!(route.any(|hop| hop["host"] == other.as_str()), "{answer:#}");
        }
    }

    attic.json(&["model", "drop", &names[1], "--json"]);
    until("only the first model is served", || {
        [&attic, &cellar].iter().all(|home| {
            let shards = home.shards();
            matches!(shards.as_slice(), [shard] if shard.starts_with(names[0].as_str()))
        })
    });
}

#[test]
fn a_second_model_makes_a_home_give_up_layers_that_exceed_the_new_share() {
    // Memory for three layers: two of one model, or one of each of two.
    let attic = Household::new(36, &[]).holding(0);
    let files = [1, 2].map(|seed| medium_model(&attic.home, seed));
    let first = attic.up(&found(&files[0]));
    assert_eq!(attic.until_serving(&first), (0, 1));
    let [_, other] = files.each_ref().map(|file| file.to_str().expect("UTF-8"));
    attic.json(&["model", "adopt", other, "--json"]);
    let each = files.each_ref().map(|file| {
        let name = name(file.to_str().expect("UTF-8"));
        format!("{name}:0-0")
    });
    first.until("it serves a layer of each model", TIMEOUT, || {
        attic.shards() == each
    });
    assert_contains(&first.said(), &["keeping only layers 0-0"]);
}

#[test]
fn a_host_takes_no_more_layers_than_its_kv_budget_has_pages_for_and_names_one_without_any() {
    let host = "research.distributed_inference.host";
    // A caller may hold 51 KiB. A page of one layer takes 32 KiB.
    let attic = Household::new(48, &[])
        .holding(0)
        .with(&format!("{host}.kv_budget_mb=1"))
        .with(&format!("{host}.kv_share_per_caller_percent=5"));
    let files = [1, 2].map(|seed| medium_model(&attic.home, seed));
    let first = attic.up(&found(&files[0]));
    assert_eq!(attic.until_serving(&first), (0, 0));
    let other = files[1].to_str().expect("UTF-8");
    attic.json(&["model", "adopt", other, "--json"]);
    first.until("it says what is missing", TIMEOUT, || {
        first.said().contains("2 models share it equally")
    });
    assert_contains(
        &first.said(),
        &["less than a page", "kv_budget_mb to 2 at the very least"],
    );
}

#[test]
fn a_share_of_the_memory_that_holds_no_layer_is_named_with_what_is_missing() {
    let (attic, first, _) = founded(2);
    attic.until_serving(&first);
    let other = medium_model(&attic.home, 2);
    let other = other.to_str().expect("UTF-8");
    attic.json(&["model", "adopt", other, "--json"]);
    let complaint = || {
        let said = first.said();
        let mut lines = said.lines();
        let line = lines.find(|line| line.contains("not one layer of"));
        line.map(str::to_owned)
    };
    until("it says what is missing", || complaint().is_some());
    let said = complaint().expect("a line");
    assert_contains(
        &said,
        &[
            name(other).as_str(),
            "beside other models (1.0 MiB)",
            "MiB are missing",
        ],
    );
    // Layers of the first model fit.
    attic.until_serving(&first);
}

#[test]
fn a_dropped_model_leaves_all_disks_but_not_the_founders_file_and_can_be_adopted_again() {
    let (attic, first, file) = founded(ALL);
    let bytes = std::fs::read(&file).expect("the file");
    let cellar = Household::new(ALL, &[&first.address]);
    let second = cellar.up(&["--join", first.code()]);
    let all = [(&attic, &first), (&cellar, &second)];
    for (home, up) in all {
        home.until_serving(up);
    }
    let answer = together(&cellar);

    let file_name = file.to_str().expect("UTF-8");
    let dropped = attic.json(&["model", "drop", &name(file_name), "--json"]);
    assert_eq!(dropped["name"], name(file_name).as_str());
    for (home, up) in all {
        until("the layers are withdrawn", || home.serving().is_none());
        until("the part is removed", || home.parts().is_empty());
        assert!(
            up.said().contains("dropped by the community"),
            "{}",
            up.said()
        );
        let output = home.run(&[&QUESTION[..], &["--no-fallback"]].concat());
        assert!(!output.status.success(), "{}", text(&output.stdout));
    }
    assert_eq!(std::fs::read(&file).expect("the file"), bytes);

    attic.json(&["model", "adopt", file_name, "--json"]);
    for (home, up) in all {
        home.until_serving(up);
        assert_eq!(home.parts().len(), 1);
    }
    assert_eq!(together(&cellar), answer);
}
