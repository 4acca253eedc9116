//! Promise 1: the same answer, however the model is split. Real model, real processes.

use hearthnet_testkit::TinyLlama;
use serde_json::{Value, json};

use crate::support::gauges::Gauges;
use crate::support::*;

const PROMPT: &str = "Tell me a short story about a lighthouse keeper and a lost whale.";

fn answer(home: &Home, ranges: &[&str], extra: &[&str]) -> Value {
    answer_over(home, &hosts(home, ranges, &[]), ranges, extra)
}

fn answer_over(home: &Home, hosts: &[Host], ranges: &[&str], extra: &[&str]) -> Value {
    let value = json_output(&home.ask(PROMPT, &hosts.iter().collect::<Vec<_>>(), extra));
    let route = value["route"].as_array().expect("a route");
    assert_eq!(route[0]["layers"], json!([0, 1]));
    assert!(route[0]["host"].is_null(), "the first layers are here");
    // Hosts that have only private layers of the caller are not used.
    let asked = ranges.iter().filter(|range| last(range) > 1).count();
    assert_eq!(route.len(), 1 + asked);
    value
}

/// Last layer of a range.
fn last(range: &str) -> u32 {
    let last = range.rsplit('-').next().expect("a range");
    last.parse().expect("a layer")
}

#[test]
fn any_split_over_one_to_five_hosts_gives_the_same_answer() {
    let home = Home::new();
    let sampling = words("--max-tokens 40 --temperature 0.9 --top-p 0.95 --seed 20261121");
    let mut local = vec!["chat", PROMPT, "--local", "--json"];
    local.extend(&sampling);
    let local = home.json(&local);
    assert!(
        local["token_ids"].as_array().expect("tokens").len() > 10,
        "{local}"
    );
    for ranges in [
        &["0-29"][..],
        &["0-14", "15-29"],
        &["0-0", "1-29"],
        &["0-9", "10-19", "20-29"],
        &["0-1", "2-27", "28-29"],
        // Hosts of all but the private layers are enough.
        &["2-19", "20-29"],
        &["0-5", "6-11", "12-17", "18-23", "24-29"],
        &["0-0", "1-3", "4-20", "21-28", "29-29"],
    ] {
        let split = answer(&home, ranges, &sampling);
        assert_eq!(split["text"], local["text"], "{ranges:?}");
        assert_eq!(split["token_ids"], local["token_ids"], "{ranges:?}");
    }
}

#[test]
fn any_split_of_a_real_k_quant_file_gives_the_same_answer() {
    let home = Home::new();
    let model = hearthnet_testkit::gemma3();
    let model = model.to_str().expect("UTF-8");
    let mut extra = words("--raw --max-tokens 24 --temperature 0.7 --seed 20261128");
    extra.extend(["--model", model]);
    let local = home.json(&[&["chat", PROMPT, "--local", "--json"], &extra[..]].concat());
    let length = local["token_ids"].as_array().expect("tokens").len();
    assert!(length > 10, "{local}");
    for ranges in [&["0-17"][..], &["0-8", "9-17"], &["0-1", "2-6", "7-17"]] {
        let split = answer_over(&home, &of_model(&home, model, ranges), ranges, &extra);
        assert_eq!(split["token_ids"], local["token_ids"], "{ranges:?}");
        assert_eq!(split["text"], local["text"], "{ranges:?}");
    }
}

/// Hosts of layers of a model.
fn of_model(home: &Home, model: &str, ranges: &[&str]) -> Vec<Host> {
    let id = home.node_id();
    let start = |range: &&str| Host::start(&Home::new(), model, range, &id, &[]);
    ranges.iter().map(start).collect()
}

/// First answer of this machine that has more than ten tokens, and its sampling flags. With random
/// weights, any token may end an answer.
fn long_answer(home: &Home, model: &str) -> (Value, String) {
    let ask = |seed: u32| {
        let sampling = format!("--max-tokens 40 --temperature 0.9 --seed {seed}");
        let local = ["chat", PROMPT, "--local", "--json", "--model", model];
        let answer = home.json(&[&local[..], &words(&sampling)].concat());
        (answer, sampling)
    };
    let is_long = |answer: &Value| answer["token_ids"].as_array().expect("tokens").len() > 10;
    let mut answers = (1..30).map(ask);
    let long = answers.find(|(answer, _)| is_long(answer));
    long.expect("a long answer")
}

#[test]
fn any_split_of_recurrent_layers_gives_the_same_answer() {
    let home = Home::new();
    let model = TinyLlama {
        recurrent: true,
        layers: 6,
        context: 512,
        ..TinyLlama::default()
    };
    let model = model.write(home.path());
    let model = model.to_str().expect("UTF-8");
    let (local, sampling) = long_answer(&home, model);
    let extra = [&words(&sampling)[..], &["--model", model]].concat();
    for ranges in [
        &["0-5"][..],
        &["0-2", "3-5"],
        &["0-0", "1-5"],
        &["2-2", "3-3", "4-5"],
        &["0-1", "2-4", "5-5"],
    ] {
        let split = answer_over(&home, &of_model(&home, model, ranges), ranges, &extra);
        assert_eq!(split["text"], local["text"], "{ranges:?}");
        assert_eq!(split["token_ids"], local["token_ids"], "{ranges:?}");
    }
}

#[test]
fn any_split_of_a_model_with_layer_inputs_gives_the_same_answer() {
    let home = Home::new();
    let model = layer_inputs(home.path());
    let model = model.to_str().expect("UTF-8");
    let (local, sampling) = long_answer(&home, model);
    let extra = [&words(&sampling)[..], &["--model", model]].concat();
    for (private, ranges) in [
        ("0", &["0-5"][..]),
        ("0", &["0-0", "1-1", "2-5"]),
        ("1", &["1-1", "2-5"]),
        // As many as by default.
        ("2", &["0-5"]),
        ("2", &["2-5"]),
    ] {
        let hosts = of_model(&home, model, ranges);
        let extra = [&extra[..], &["--private-first", private]].concat();
        let output = home.ask(PROMPT, &hosts.iter().collect::<Vec<_>>(), &extra);
        let said = text(&output.stderr);
        let split = json_output(&output);
        assert_eq!(
            split["token_ids"], local["token_ids"],
            "{private}, {ranges:?}"
        );
        assert_eq!(split["text"], local["text"], "{private}, {ranges:?}");
        assert_contains(&said, &["per-layer embeddings", "exactly"]);
    }
    let refused = home.run(
        &[
            &ENABLE[..],
            &["shard", "serve", "--model", model, "--layers", "2-4"],
        ]
        .concat(),
    );
    assert_complains(&refused, "uses the keys and values of layer");
}

#[test]
fn a_model_with_layer_inputs_answers_and_makes_vectors_over_http_and_is_audited() {
    let home = Home::new();
    let model = layer_inputs(home.path());
    let model = model.to_str().expect("UTF-8");
    let printed = home.json(&["embed", "--model", model, "--json", "a whale"]);
    let hosts = of_model(&home, model, &["1-1", "1-1", "2-5", "2-5"]);
    let over_hosts = shards(hosts.iter().map(|host| &host.address));
    let audited = words("--set research.distributed_inference.audit_share=1");
    let settings = [&ENABLE[..], &audited].concat();
    let answers = [&["--local"][..], &over_hosts].map(|how| {
        let how = match how {
            ["--local"] => how.to_vec(),
            hosts => [&["--private-first", "1", "--no-fallback"], hosts].concat(),
        };
        let service = Server::api(&home, &settings, model, &how);
        let (address, id) = (http::address(&service), service.ready["models"][0].clone());
        let body = json!({
            "model": id, "prompt": PROMPT, "max_tokens": 24, "temperature": 0.9, "seed": 5,
        });
        let (status, answer) = http::post_json(&address, "/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let body = json!({"model": id, "input": "a whale"});
        let (status, vectors) = http::post_json(&address, "/v1/embeddings", &body);
        assert_eq!(status, 200, "{vectors}");
        let text = answer["choices"][0]["text"].clone();
        (service, text, vectors["data"][0]["embedding"].clone())
    });
    let [(_, alone, vector), (service, together, same)] = &answers;
    assert_eq!((together, same), (alone, vector));
    let printed: Vec<f32> = serde_json::from_value(printed["vectors"][0].clone()).expect("one");
    let vector: Vec<f32> = serde_json::from_value(vector.clone()).expect("numbers");
    assert_eq!(vector, printed);
    // Another host of each range computes the rows again, with the inputs of its layers.
    let address = http::address(service);
    let audits = |result: &str| {
        let name = format!("distributed_inference_audits_total{{result=\"{result}\"}}");
        Gauges::at(&address).value(&name)
    };
    until("both spans are audited", || {
        assert_eq!(audits("mismatch"), None);
        audits("confirmed").is_some_and(|count| count >= 2.0)
    });
}

#[test]
fn overlapping_hosts_are_trimmed_and_give_the_same_answer() {
    let home = Home::new();
    let sampling = ["--max-tokens", "16", "--temperature", "0"];
    let local = home.json(&[&["chat", PROMPT, "--local", "--json"], &sampling[..]].concat());
    let split = answer(&home, &["0-17", "10-29"], &sampling);
    assert_eq!(split["token_ids"], local["token_ids"]);
    assert_eq!(split["route"][2]["layers"], json!([18, 29]));
}

#[test]
fn however_many_first_and_last_layers_are_private_the_answer_is_the_same() {
    let home = Home::new();
    let greedy = ["--max-tokens", "16", "--temperature", "0"];
    let local = home.json(&[&["chat", PROMPT, "--local", "--json"], &greedy[..]].concat());
    for ranges in [&["0-14", "15-29"][..], &["0-4", "5-25", "26-29"]] {
        let hosts = hosts(&home, ranges, &[]);
        let hosts: Vec<&Host> = hosts.iter().collect();
        let pairs = [0, 1, 2, 5, 29].map(|first| [0, 1, 3].map(|own_last| (first, own_last)));
        for (first, own_last) in pairs.concat() {
            if first + own_last > 29 {
                continue;
            }
            let (first, own_last) = (first.to_string(), own_last.to_string());
            let private = ["--private-first", &first, "--private-last", &own_last];
            let extra = [&private[..], &greedy].concat();
            let output = home.ask(PROMPT, &hosts, &extra);
            let said = text(&output.stderr);
            let answer = json_output(&output);
            assert_eq!(
                said.contains("exactly"),
                first == "0",
                "{private:?}: {said}"
            );
            assert_eq!(
                answer["token_ids"], local["token_ids"],
                "{ranges:?} {private:?}"
            );
            assert_eq!(answer["text"], local["text"], "{ranges:?} {private:?}");
        }
    }
}

#[test]
fn private_layers_that_leave_hosts_nothing_are_refused() {
    let home = Home::new();
    let hosts = hosts(&home, &["0-29"], &[]);
    let host: Vec<&Host> = hosts.iter().collect();
    let output = home.ask(
        PROMPT,
        &host,
        &["--private-first", "29", "--private-last", "1"],
    );
    let said = text(&output.stderr);
    assert!(!output.status.success());
    assert_contains(&said, &["none of the 30 layers", "--local"]);
}

#[test]
fn another_seed_gives_another_answer() {
    let home = Home::new();
    let ask = |seed: &str| {
        let sampled = ["--max-tokens", "24", "--temperature", "1.2", "--seed", seed];
        let said = home.json(&[&["chat", PROMPT, "--local", "--json"], &sampled[..]].concat());
        said["text"].clone()
    };
    assert_eq!(ask("1"), ask("1"));
    assert_ne!(ask("1"), ask("2"));
}
