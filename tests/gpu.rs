//! Graphics cards in the program: beside hosts on processors in one pipeline, with the same bytes.
//! The card is Mesa's driver that computes on the processor: these tests say nothing about speed.

mod failing;

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use hearthnet_orchestrator::chat::ChatRequest;
use hearthnet_orchestrator::sharded::PumpSettings;

use crate::support::caller::{Caller, TOKENS, request};
use crate::support::community::founded_bare;
use crate::support::*;

/// Arguments of a host on a card.
const CARD: [&str; 2] = ["--device", "gpu:0"];

const PROMPT: &str = "Tell me a short story about a lighthouse keeper and a lost whale.";
/// Sampling, so that a single wrong bit soon shows.
const SAMPLING: &str = "--max-tokens 24 --temperature 0.9 --top-p 0.95 --seed 20261129";

fn local(home: &Home) -> Value {
    let ask = ["chat", PROMPT, "--local", "--json"];
    home.json(&[&ask[..], &words(SAMPLING)].concat())
}

fn software(host: &Host) -> &str {
    let software = &host.process.ready["descriptor"]["software"];
    software.as_str().expect("text")
}

/// Standard error of a host that is refused, with environment variables.
fn refusal(home: &Home, device: &str, environment: &[(&str, &str)]) -> String {
    let serve = ["shard", "serve", "--json", "--model", model(), "--layers"];
    let what = ["10-19", "--peer-key", &home.node_id(), "--device", device];
    let mut command = home.hearthnet(&[&ENABLE[..], &serve, &what].concat());
    let output = command.envs(environment.iter().copied()).output();
    let output = output.expect("it ran");
    assert!(!output.status.success());
    text(&output.stderr)
}

#[test]
fn a_host_on_a_card_among_hosts_on_processors_gives_the_same_answer() {
    let home = Home::new();
    let local = local(&home);
    for ranges in [["0-9", "10-19", "20-29"], ["0-1", "2-3", "4-29"]] {
        let hosts = [
            host(&home, ranges[0], &["--device", "cpu"]),
            host(&home, ranges[1], &CARD),
            host(&home, ranges[2], &["--device", "cpu"]),
        ];
        let arithmetic = |host: &Host| host.process.ready["descriptor"]["arithmetic"].clone();
        let found: Vec<Value> = hosts.iter().map(arithmetic).collect();
        assert_eq!(found, ["canonical-1", "canonical-1", "canonical-1"]);
        assert!(
            software(&hosts[1]).contains(" card/"),
            "{}",
            software(&hosts[1])
        );
        assert!(!software(&hosts[0]).contains(" card/"));
        let all: Vec<&Host> = hosts.iter().collect();
        let answer = json_output(&home.ask(PROMPT, &all, &words(SAMPLING)));
        assert_eq!(answer["text"], local["text"], "{ranges:?}");
        assert_eq!(answer["token_ids"], local["token_ids"], "{ranges:?}");
        assert_eq!(answer["arithmetic"], json!(["canonical-1"]));
    }
}

#[test]
fn an_answer_keeps_its_bytes_when_the_process_of_the_card_ends_in_the_middle() {
    let home = Home::new();
    let expected = local(&home);
    let (first, second) = (
        host(&home, "0-19", &["--device", "cpu"]),
        host(&home, "20-29", &CARD),
    );
    let spare = host(&home, "20-29", &["--device", "cpu"]);
    let all = shards([&first, &second, &spare].map(|host| &host.address));
    let ask = ["chat", PROMPT, "--no-fallback", "--frames"];
    let args = [&ENABLE[..], &ask, &words(SAMPLING), &all].concat();
    let engine = engine_of(second.process.child.id());
    let frames = frames(&mut home.hearthnet(&args), 4, |_| {
        kill_process(pid(engine), Signal::KILL).expect("our own process");
    });
    let done = told(&frames, "done")[0];
    assert_eq!(done["text"], expected["text"]);
    // The host itself goes on, on its processor.
    let again = json_output(&home.ask(PROMPT, &[&first, &second], &words(SAMPLING)));
    assert_eq!(again["text"], expected["text"]);
}

/// Host of the first half of the layers.
struct OneHalf {
    layers: &'static str,
    device: &'static str,
    host: Host,
}

impl OneHalf {
    fn start(caller: &Caller, layers: &'static str, device: &'static str) -> Self {
        let host = caller.host(layers, &["--device", device]);
        assert_eq!(software(&host).contains(" card/"), device != "cpu");
        Self {
            layers,
            device,
            host,
        }
    }
}

/// Two hosts of the first half of the layers, of which one computes on a card, and one host of the
/// second half. The host in use of the first half fails at each position in turn: so the card either
/// fails or takes over.
fn matrix(caller: &Caller, request: &ChatRequest, positions: &[u32]) {
    let undisturbed = caller.alone(request);
    assert_eq!(undisturbed.token_ids.len() as u32, TOKENS);
    let last = caller.host("15-29", &["--device", "cpu"]);
    let halves = [("0-14", "gpu:0"), ("0-14", "cpu")];
    let mut halves = halves.map(|(layers, device)| OneHalf::start(caller, layers, device));
    let mut hit = Vec::new();
    for engine_only in [false, true] {
        for &position in positions {
            let what = format!("token {position}, only the engine: {engine_only}");
            let hosts = halves.iter().map(|half| &half.host).chain([&last]);
            let addresses: Vec<String> = hosts.map(|host| host.address.clone()).collect();
            let mut struck = None;
            let mut conversation = caller.open(&caller.connect(&addresses), false);
            let strike = |token: u32, route: &[String]| {
                if token != position {
                    return;
                }
                let place = addresses.iter().position(|host| host.ends_with(&route[0]));
                let place = place.expect("a host of these");
                let daemon = halves[place].host.process.child.id();
                let victim = match engine_only {
                    true => engine_of(daemon),
                    false => daemon,
                };
                kill_process(pid(victim), Signal::KILL).expect("our own process");
                wait_for_end(victim);
                struck = Some(place);
            };
            let (_, heard) =
                caller.same_answer(&mut conversation, request, &undisturbed, &what, strike);
            assert_eq!(heard.recoveries.len(), 1, "{what}");
            assert!(!heard.local, "{what}");
            let place = struck.expect("a host was hit");
            hit.push(halves[place].device);
            let OneHalf { layers, device, .. } = halves[place];
            halves[place] = OneHalf::start(caller, layers, device);
        }
    }
    println!("hit, in this order: {}", hit.join(" "));
}

#[test]
fn an_answer_keeps_its_bytes_wherever_a_card_fails_or_takes_over() {
    let caller = Caller::with(u32::MAX, PumpSettings::default().health_timeout, (0, 0));
    matrix(&caller, &request(PROMPT, 7), &[0, 17]);
}

#[test]
fn an_answer_of_recurrent_layers_keeps_its_bytes_wherever_a_card_fails_or_takes_over() {
    let caller = Caller::recurrent((0, 0));
    // With random weights, any token may end an answer.
    let asked = (0..100).map(|seed| request(PROMPT, seed));
    let mut long = asked.filter(|asked| caller.alone(asked).token_ids.len() as u32 == TOKENS);
    let request = long.next().expect("a long answer");
    matrix(&caller, &request, &[0, 1, 17, TOKENS - 2]);
}

#[test]
fn a_machine_without_a_driver_says_so_in_one_sentence_and_its_processor_computes() {
    let home = Home::new();
    // The loader of Vulkan then finds no driver.
    let none = [
        ("VK_DRIVER_FILES", "/nonexistent"),
        ("VK_ICD_FILENAMES", "/nonexistent"),
    ];
    let why = refusal(&home, "gpu", &none);
    assert_contains(&why, &["no driver of a graphics card was found"]);
    let (auto, id) = (["--device", "auto"], home.node_id());
    let auto = Host::start_with(&Home::new(), model(), "10-19", &id, &auto, &none);
    assert!(!software(&auto).contains(" card/"), "{}", software(&auto));
}

#[test]
fn a_missing_card_is_refused_in_one_sentence_and_auto_uses_the_processor() {
    let home = Home::new();
    let why = refusal(&home, "gpu:99", &[]);
    assert_contains(&why, &["there is no graphics card 99 on this machine"]);
    // `auto` never takes a driver that computes on the processor.
    let auto = host(&home, "10-19", &["--device", "auto"]);
    assert!(!software(&auto).contains(" card/"), "{}", software(&auto));
}

#[test]
fn a_card_is_measured_and_diagnose_lists_it_with_its_arithmetic() {
    let home = Home::new();
    let args = "bench engine --device gpu:0 --threads 1 --prefill 8 --decode 4 --repetitions 1";
    let measured = home.json(&[&words(args)[..], &["--json", "--model", model()]].concat());
    assert_eq!(measured["engine"], "canonical-1");
    let results = measured["results"].as_array().expect("results");
    let tests: Vec<&Value> = results.iter().map(|result| &result["test"]).collect();
    assert_eq!(tests, ["prefill", "decode"]);
    for result in results {
        assert!(result["tokens_per_second"].as_f64() > Some(0.0), "{result}");
    }
    let (founder, _node) = founded_bare();
    let told = text(&founder.run(&["diagnose"]).stderr);
    let card = ["graphics card here: gpu:0 ", "the same bytes, arithmetic "];
    assert_contains(&told, &card);
}
