//! Output of commands about the part of an adopted model that is on this machine, and the memory
//! that a home announces.

use hearthnet_bus::NodeKey;
use hearthnet_bus::log::EventLog;

use crate::support::up::{Household, medium};
use crate::support::*;
use crate::weights::founded;

/// Memory for all layers of the models here, in MiB.
const ALL: u32 = 4096;

/// Name of the models here.
const NAME: &str = "tiny-f32-1";

#[test]
fn commands_find_the_part_of_an_adopted_model_by_its_name_and_say_what_it_lacks() {
    let (attic, first) = founded(&medium(6));
    let cellar = Household::new(30, &[&first.address]);
    let second = cellar.up(&["--join", first.code()]);
    assert_eq!(cellar.until_serving(&second), (3, 4));
    second.stop();
    // The sandbox of these commands denies the user's files, and so the log.
    let model = |home: &Household, args: &[&str]| {
        let mut command = home.command(&[&["model"][..], args].concat());
        command.env("HOME", home.home.path());
        command.output().expect("its end")
    };
    let whole = succeeded(&model(&attic, &["verify", NAME]));
    assert_contains(&whole, &["header match the adopted model", "layers   0-5"]);
    assert!(!whole.contains("not here"), "{whole}");
    let said = succeeded(&model(&cellar, &["verify", NAME]));
    assert_contains(&said, &["match the adopted model", "are not here"]);
    let path = cellar.part().expect("a part").path();
    let path = path.to_str().expect("UTF-8");
    for (named, compared_with) in [(NAME, "adopted_model"), (path, "piece_list")] {
        let said = succeeded(&model(&cellar, &["verify", named, "--json"]));
        let found: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        assert_eq!(found["compared_with"], compared_with);
        assert!(found["pieces_held"].as_u64() < found["pieces"].as_u64());
    }
    let said = succeeded(&model(&cellar, &["inspect", NAME]));
    let weights = cellar.part().expect("a part").identity().weights;
    assert_contains(&said, &[&weights.to_string()]);
    for (home, is_whole) in [(&attic, true), (&cellar, false)] {
        let to = home.home.path().join("converted.gguf");
        let to = to.to_str().expect("UTF-8");
        let output = model(home, &["convert", NAME, "--to", "q8_0", "--output", to]);
        assert_eq!(output.status.success(), is_whole);
        if !is_whole {
            assert_complains(&output, "only a part of tiny-f32-1 is on this machine");
        }
    }

    let serve = ["serve", "--model", NAME, "--layers", "5-5"];
    let output = cellar.run(&serve);
    assert!(!output.status.success());
    assert_complains(
        &output,
        "layers 5-5 of tiny-f32-1 are not all on this machine",
    );
    assert_complains(&output, "`hearthnet model pull tiny-f32-1 --layers 5-5`");
    // The command that the message names makes it work.
    succeeded(&cellar.run(&["model", "pull", NAME, "--layers", "5-5"]));
    let third = cellar.serve(&serve[1..]);
    assert_eq!(cellar.until_serving(&third), (5, 5));
    third.stop();
    let output = cellar.run(&["chat", "Name three colours.", "--local", "--model", NAME]);
    assert!(!output.status.success());
    assert_complains(&output, "only a part of tiny-f32-1 is on this machine");
    // The home with the whole file answers alone with the model of the community.
    let ask = words("chat colours --local --temperature=0 --max-tokens=8");
    let named = [&ask[..], &["--model", NAME]].concat();
    let answers = [&ask, &named].map(|ask| succeeded(&attic.run(ask)));
    assert_eq!(answers[0], answers[1]);
}

/// Memory that a home has announced, as its own log has it.
fn announced(home: &Household) -> Option<u64> {
    let data = home.home.path().join("data");
    let own = NodeKey::load(&data.join("node.key")).expect("its key").id();
    let state = EventLog::open(&data).expect("its log").state();
    let mut measured = state.measured(hearthnet_bus::now_ms());
    let (_, measured) = measured.find(|(node, _)| **node == own)?;
    Some(measured.memory_bytes)
}

#[test]
fn a_home_announces_no_memory_until_its_models_are_open_again() {
    let (attic, first) = founded(&medium(3));
    let cellar = Household::new(ALL, &[&first.address]);
    let second = cellar.up(&["--join", first.code()]);
    cellar.until_serving(&second);
    second.until("it announces memory", TIMEOUT, || {
        announced(&cellar).is_some_and(|bytes| bytes > 0)
    });
    // Both end without a word, so the announcement still counts.
    let address = first.address.clone();
    second.kill();
    first.kill();
    for part in cellar.parts() {
        std::fs::remove_dir_all(part).expect("a folder");
    }
    let second = cellar.up(&[]);
    second.until("it announces none", TIMEOUT, || {
        announced(&cellar) == Some(0)
    });
    let _first = attic.up_at(&address, &[]);
    second.until("it announces memory again", TIMEOUT, || {
        announced(&cellar).is_some_and(|bytes| bytes > 0)
    });
}
