//! HTTP interface with common clients: OpenAI's, Anthropic's and Ollama's own Python packages, curl,
//! Prometheus' parser. Real model, real processes.

use std::process::Command;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::gauges::Gauges;
use crate::support::http::Reply;
use crate::support::*;

/// Running `hearthnet serve`, stopped when dropped.
pub(crate) struct Service {
    process: Server,
    pub(crate) url: String,
    pub(crate) model: String,
    /// Hosts of the service, stopped with it.
    hosts: Vec<Host>,
}

/// Starts the service, with `before` in front of the command and `after` behind it.
fn start(home: &Home, before: &[&str], after: &[&str], hosts: Vec<Host>) -> Service {
    let process = Server::api(home, before, model(), after);
    let ready = &process.ready;
    Service {
        url: ready["url"].as_str().expect("a URL").to_owned(),
        model: ready["models"][0].as_str().expect("a model").to_owned(),
        process,
        hosts,
    }
}

/// Service of one machine, with a home of its own.
pub(crate) fn alone() -> Service {
    start(&Home::new(), &[], &["--local"], Vec::new())
}

/// Service over two hosts with half of the layers each.
pub(crate) fn over_hosts(settings: &[&str]) -> Service {
    over_cut(&["0-14", "15-29"], settings)
}

/// Service over hosts with these layers.
fn over_cut(layers: &[&str], settings: &[&str]) -> Service {
    let home = Home::new();
    let hosts = hosts(&home, layers, &[]);
    let mut before = ENABLE.to_vec();
    for setting in settings {
        before.extend(["--set", setting]);
    }
    let addresses: Vec<String> = hosts.iter().map(|host| host.address.clone()).collect();
    start(&home, &before, &shards(&addresses), hosts)
}

impl Service {
    /// Result of a scenario of OpenAI's package.
    fn client(&self, what: &str) -> Value {
        self.run("openai_http.py", &[what])
    }

    /// Result of a script in `tests/clients`.
    fn run(&self, script: &str, args: &[&str]) -> Value {
        client(script, &[&[&*self.url, &self.model][..], args].concat())
    }

    /// Starts a streamed answer.
    fn stream(&self, body: &Value) -> Reply {
        let reply = Reply::chat(&http::address(&self.process), body);
        assert_eq!(reply.status, 200);
        reply
    }

    fn kill_first_host(&mut self) {
        self.hosts[0].process.end(Signal::KILL);
    }
}

#[test]
fn openais_package_is_answered_over_two_hosts() {
    let service = over_hosts(&[]);
    for what in words("models stream logprobs stop seed errors turns disconnect") {
        service.client(what);
    }
    let shards = service.client("metrics")["shards"].clone();
    assert_eq!(shards.as_array().map(Vec::len), Some(2), "{shards}");

    // Same text and same fingerprint as from this machine alone, and the same scores to the bit.
    let alone = alone();
    for what in ["plain", "choices", "scores"] {
        assert_eq!(service.client(what), alone.client(what), "{what}");
    }
}

/// Starts four streamed stories.
fn stories(service: &Service) -> Reply {
    let body = json!({
        "model": service.model, "max_tokens": 60, "temperature": 0.9, "seed": 11, "n": 4,
        "stream": true,
        "messages": [{"role": "user", "content": "Tell me a story about a whale."}],
    });
    service.stream(&body)
}

/// `count` chunks, or all that are left, none of which is an error.
fn chunks(reply: &mut Reply, count: usize) -> impl Iterator<Item = Value> {
    let chunks = std::iter::from_fn(|| reply.event()).take(count);
    chunks.inspect(|chunk| assert!(chunk.get("error").is_none(), "{chunk}"))
}

/// Adds the texts of [`chunks`] to the stories.
fn read_stories(reply: &mut Reply, count: usize, stories: &mut [String; 4]) {
    for chunk in chunks(reply, count) {
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().expect("an index") as usize;
        stories[index] += choice["delta"]["content"].as_str().unwrap_or_default();
    }
}

#[test]
fn none_of_several_answers_loses_a_token_if_a_host_dies() {
    let alone = alone();
    let mut undisturbed = <[String; 4]>::default();
    read_stories(&mut stories(&alone), usize::MAX, &mut undisturbed);
    assert!(undisturbed.iter().all(|story| story.len() > 60));

    let mut service = over_hosts(&[]);
    let mut reply = stories(&service);
    let mut told = <[String; 4]>::default();
    read_stories(&mut reply, 24, &mut told);
    service.kill_first_host();
    read_stories(&mut reply, usize::MAX, &mut told);
    assert_eq!(told, undisturbed);
}

#[test]
fn clients_of_every_api_get_the_same_texts_and_vectors_over_two_hosts() {
    let split = over_hosts(&[]).run("apis.py", &[]);
    let alone = alone();
    assert_eq!(split, alone.run("apis.py", &[]));
}

#[test]
fn anthropics_package_runs_loops_of_tools_over_two_hosts() {
    let split = over_hosts(&[]).run("anthropic_tools.py", &[]);
    let alone = alone();
    assert_eq!(split, alone.run("anthropic_tools.py", &[]));
}

#[test]
fn vectors_are_the_same_if_a_host_dies_among_them() {
    let texts: Vec<String> = (0..15)
        .map(|n| format!("Story {n}. {}", "A whale swims in the sea. ".repeat(12)))
        .collect();
    let embed = |address: &str, model: &str| {
        let body = json!({"model": model, "input": texts});
        let (status, answer) = http::post_json(address, "/v1/embeddings", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let alone = alone();
    let undisturbed = embed(&http::address(&alone.process), &alone.model);
    let vectors = undisturbed["data"].as_array().map(Vec::len);
    assert_eq!(vectors, Some(texts.len()));

    // The texts are several groups, of which one after the other is computed.
    let one = "research.distributed_inference.max_concurrent_pipelines=1";
    let mut service = over_hosts(&[one]);
    let (address, model) = (http::address(&service.process), service.model.clone());
    let answer = std::thread::scope(|scope| {
        let asked = scope.spawn(|| embed(&address, &model));
        until("a group is embedded", || {
            let answers = Gauges::at(&address).value("hearthnet_answers_total{code=\"ok\"}");
            answers.is_some_and(|count| count >= 1.0)
        });
        service.kill_first_host();
        asked.join().expect("an answer")
    });
    assert_eq!(answer, undisturbed);
    let fallbacks = "distributed_inference_fallback_to_local_total";
    assert!(Gauges::at(&address).count(fallbacks) >= 1);
}

#[test]
fn every_path_of_the_description_is_served() {
    let service = alone();
    let address = http::address(&service.process);
    let document = http::get_json(&address, "/openapi.json");
    let paths = document["paths"].as_object().expect("paths");
    let mut posts = 0;
    for (path, about) in paths {
        let at = path.replace("{id}", &service.model);
        if about.get("get").is_some() && path.contains("/responses/") {
            // No response is kept, and the answer says so.
            let (status, body) = http::answer(&address, &at);
            assert_eq!(status, 404, "{path}");
            assert!(body.contains("response_not_found"), "{body}");
        } else if about.get("get").is_some() {
            http::get(&address, &at);
        }
        if about.get("post").is_some() {
            // Without a field or a community each is refused, but not as unknown.
            let (status, _) = http::post_json(&address, &at, &json!({}));
            assert!(!matches!(status, 404 | 405), "{path}: {status}");
            posts += 1;
        }
    }
    assert!(posts > 10, "{posts}");
}

#[test]
fn answers_by_a_grammar_are_valid_and_the_same_for_every_cut() {
    is_the_same_for_every_cut("grammars");
}

/// Checks that a scenario has the same result on one machine and over two hosts, whether the layers
/// are cut in the middle or near the start.
fn is_the_same_for_every_cut(what: &str) {
    let here = alone().client(what);
    for layers in [&["0-14", "15-29"][..], &["0-4", "5-29"]] {
        assert_eq!(over_cut(layers, &[]).client(what), here, "{layers:?}");
    }
}

/// Starts a streamed answer: a list of twelve texts.
fn list(service: &Service) -> Reply {
    let schema = json!({
        "type": "array", "minItems": 12, "maxItems": 12,
        "items": {"type": "string", "minLength": 8, "maxLength": 30},
    });
    let body = json!({
        "model": service.model, "temperature": 0.7, "seed": 5, "stream": true,
        "messages": [{"role": "user", "content": "List twelve things to do on a rainy day, as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "l", "schema": schema}},
    });
    service.stream(&body)
}

#[test]
fn an_answer_by_a_schema_survives_the_death_of_a_host() {
    let alone = alone();
    let undisturbed = read(&mut list(&alone), usize::MAX);
    let texts: Vec<String> = serde_json::from_str(&undisturbed).expect("a list of texts");
    assert_eq!(texts.len(), 12);
    let fits = |text: &String| (8..=30).contains(&text.chars().count());
    assert!(texts.iter().all(fits), "{texts:?}");

    let mut service = over_hosts(&[]);
    let mut reply = list(&service);
    let mut told = read(&mut reply, 8);
    service.kill_first_host();
    told += &read(&mut reply, usize::MAX);
    assert_eq!(told, undisturbed);
    let address = http::address(&service.process);
    let fallbacks = "distributed_inference_fallback_to_local_total";
    assert_eq!(Gauges::at(&address).count(fallbacks), 1);
}

#[test]
fn calls_of_tools_are_whole_and_the_same_for_every_cut() {
    is_the_same_for_every_cut("tools");
}

/// Starts a streamed call of a tool with a list of twelve texts.
fn call(service: &Service) -> Reply {
    let things = json!({
        "type": "array", "minItems": 12, "maxItems": 12,
        "items": {"type": "string", "minLength": 8, "maxLength": 30},
    });
    let schema = json!({
        "type": "object", "properties": {"things": things}, "required": ["things"],
        "additionalProperties": false,
    });
    let body = json!({
        "model": service.model, "temperature": 0.7, "seed": 5, "stream": true,
        "messages": [{"role": "user", "content": "Save twelve things to do on a rainy day."}],
        "tools": [{"type": "function", "function": {"name": "save", "parameters": schema}}],
        "tool_choice": "required", "parallel_tool_calls": false,
    });
    service.stream(&body)
}

/// Arguments in the deltas of [`chunks`].
fn arguments(reply: &mut Reply, count: usize) -> String {
    let said = |chunk: Value| {
        let call = &chunk["choices"][0]["delta"]["tool_calls"][0];
        let said = call["function"]["arguments"].as_str();
        said.unwrap_or_default().to_owned()
    };
    chunks(reply, count).map(said).collect()
}

#[test]
fn a_call_of_a_tool_survives_the_death_of_a_host() {
    let alone = alone();
    let undisturbed = arguments(&mut call(&alone), usize::MAX);
    let saved: Value = serde_json::from_str(&undisturbed).expect("an object");
    assert_eq!(saved["things"].as_array().map(Vec::len), Some(12));

    let mut service = over_hosts(&[]);
    let mut reply = call(&service);
    let mut told = arguments(&mut reply, 8);
    service.kill_first_host();
    told += &arguments(&mut reply, usize::MAX);
    assert_eq!(told, undisturbed);
}

#[test]
fn chat_answers_by_the_schema_of_a_file() {
    let home = Home::new();
    let file = home.path().join("schema.json");
    std::fs::write(&file, r#"{"enum": ["red", "green"]}"#).expect("a file");
    let schema = file.to_str().expect("UTF-8");
    let local = ["chat", "--local", "--model", model()];
    let ask = [&local[..], &["--json-schema", schema, "A colour, as JSON:"]].concat();
    let said = home.says(&ask);
    assert!([r#""red""#, r#""green""#].contains(&said.trim()), "{said}");
    std::fs::write(&file, r#"{"not": {}}"#).expect("a file");
    let refused = home.run(&[&ask[..], &["--json"]].concat());
    assert_fails(&refused, 3, "bad_request");
    assert_complains(&refused, "`not`");
}

#[test]
fn ten_concurrent_requests_get_equal_answers_or_retry_after() {
    let service = over_hosts(&[]);
    let all = service.client("crowd");
    assert_eq!(all["answered"], 10, "{all}");
    // Four chats run and two wait; others may be refused, and are if none ends in time.
    let service = over_hosts(&["research.distributed_inference.max_waiting_chats=2"]);
    let some = service.client("crowd");
    assert_eq!(some["text"], all["text"]);
    assert!(some["answered"].as_u64().is_some_and(|n| n >= 6), "{some}");
    println!("of ten at once {} were refused", some["refused"]);
}

#[test]
fn a_single_machine_answers_a_crowd_a_conversation_and_curl_and_ends_at_an_interrupt() {
    let mut service = alone();
    assert_eq!(service.client("crowd")["answered"], 10);
    service.client("turns");
    match Command::new("curl").arg("--version").output() {
        Ok(_) => curl_gets_an_answer_and_a_stream(&service),
        Err(_) => skipped("there is no curl on this machine"),
    }
    assert_eq!(service.process.end(Signal::INT).code(), Some(0));
}

fn curl_gets_an_answer_and_a_stream(service: &Service) {
    let curl = |extra: Value| {
        let mut body = json!({
            "model": service.model, "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 8, "temperature": 0,
        });
        body["stream"] = extra;
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--no-buffer"])
            .arg("--fail-with-body")
            .arg(format!("{}/chat/completions", service.url))
            .args(["-H", "Content-Type: application/json"])
            .args(["-d", &body.to_string()])
            .output()
            .expect("curl starts");
        succeeded(&output)
    };
    let plain: Value = serde_json::from_str(&curl(json!(false))).expect("JSON");
    let said = plain["choices"][0]["message"]["content"]
        .as_str()
        .expect("a text");
    let stream = curl(json!(true));
    assert!(stream.ends_with("data: [DONE]\n\n"), "{stream}");
    let streamed: String = stream
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
        .filter_map(|chunk| Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned()))
        .collect();
    assert_eq!(streamed, said);
}

#[test]
fn a_key_file_guards_the_http_interface_and_must_be_its_owners_own() {
    let home = Home::new();
    let path = home.path().join("http.key");
    std::fs::write(&path, "a-key-of-sixteen-bytes-or-more\n").expect("a file");
    let setting = format!("http.api_key_file={}", path.display());
    let before = ["--set", setting.as_str()];
    chmod(&path, 0o644);
    let mut args = before.to_vec();
    args.extend(["serve", "--local", "--json", "--http", "127.0.0.1:0"]);
    assert_fails(&home.run(&args), 2, "bad_config");
    chmod(&path, 0o600);
    let service = start(&home, &before, &["--local"], Vec::new());
    service.client("key");
}

#[test]
fn an_invalid_http_service_is_refused_at_start() {
    let home = Home::new();
    let open = home.run(&["serve", "--local", "--json", "--http", "0.0.0.0:0"]);
    assert_fails(&open, 2, "bad_config");
    assert_complains(&open, "key");
    let shard = format!("127.0.0.1:1#{}", home.node_id());
    let off = home.run(&["serve", "--json", "--shard", &shard]);
    assert_fails(&off, 7, "experimental_disabled");
}

/// Service of a community's founder.
fn in_community(founder: &Home, fallback: bool) -> Service {
    let fallback = format!("research.distributed_inference.fallback_to_local={fallback}");
    let process = community::serve(founder, &["--set", &fallback]);
    let models = http::get_json(&http::address(&process), "/v1/models");
    Service {
        url: process.ready["url"].as_str().expect("a URL").to_owned(),
        model: models["data"][0]["id"]
            .as_str()
            .expect("a model")
            .to_owned(),
        process,
        hosts: Vec::new(),
    }
}

#[test]
fn a_community_answers_openais_package_and_a_dying_host_costs_no_token() {
    let founder = community::founder();
    // Without local fallback, so that only hosts answer.
    let service = in_community(&founder, false);
    let address = http::address(&service.process);
    let member = || community::join(&founder, &service.process);
    let (all, first, second) = (member(), member(), member());
    let mut host = community::host(&all, &service.process, "0-29");
    let advertised = |count: usize| {
        until("they are advertised", || {
            let status = founder.json(&["status", "--json"]);
            let shards = status["models"][0]["shards"].as_array();
            shards.is_some_and(|shards| shards.len() >= count)
        })
    };
    advertised(1);
    for what in ["models", "stream", "errors", "turns", "disconnect"] {
        service.client(what);
    }
    let split = service.client("plain");
    let alone = alone();
    assert_eq!(split, alone.client("plain"));
    let undisturbed = read(&mut tell(&alone, STORY), usize::MAX);

    // A chat that starts now uses this host, whatever hosts come later: it holds the prefix.
    let beginning = read(&mut tell(&service, 4), usize::MAX);
    assert!(undisturbed.starts_with(&beginning));
    let _spares = [(&first, "0-14"), (&second, "15-29")]
        .map(|(member, layers)| community::host(member, &service.process, layers));
    advertised(3);
    let mut reply = tell(&service, STORY);
    let mut story = read(&mut reply, 8);
    host.end(Signal::KILL);
    story += &read(&mut reply, usize::MAX);
    assert_eq!(story, undisturbed);
    let failovers = Gauges::at(&address).count("distributed_inference_failovers_total");
    assert_eq!(failovers, 1);
}

/// Tokens of a story.
const STORY: usize = 160;

/// Starts a streamed story.
fn tell(service: &Service, tokens: usize) -> Reply {
    let body = json!({
        "model": service.model, "max_tokens": tokens, "temperature": 0, "stream": true,
        "messages": [{"role": "user", "content": "Tell me a story about a whale."}],
    });
    service.stream(&body)
}

/// Text of [`chunks`].
fn read(reply: &mut Reply, count: usize) -> String {
    let said = |chunk: Value| {
        let said = chunk["choices"][0]["delta"]["content"].as_str();
        said.unwrap_or_default().to_owned()
    };
    chunks(reply, count).map(said).collect()
}

/// Peak memory of a process, in bytes.
fn peak(process: &Server) -> u64 {
    kernel_number(process.child.id(), "VmHWM:") << 10
}

#[test]
fn chats_of_a_community_without_hosts_continue_locally_on_one_engine() {
    let founder = community::founder();
    let service = in_community(&founder, true);
    let address = http::address(&service.process);
    let member = community::join(&founder, &service.process);
    let mut host = community::host(&member, &service.process, "0-29");
    let mut replies = [(); 3].map(|()| tell(&service, STORY));
    let mut stories = [0, 1, 2].map(|n| read(&mut replies[n], 8));
    let before = peak(&service.process);
    host.end(Signal::KILL);
    for (story, reply) in stories.iter_mut().zip(&mut replies) {
        *story += &read(reply, usize::MAX);
    }
    let alone = alone();
    let undisturbed = read(&mut tell(&alone, STORY), usize::MAX);
    for story in stories {
        assert_eq!(story, undisturbed);
    }
    let fallbacks = "distributed_inference_fallback_to_local_total";
    assert_eq!(Gauges::at(&address).count(fallbacks), 3);
    // The weights of all layers take 63 MiB in their compute layout. On a busy machine the trie of the
    // vocabulary, 25 MB, is made meanwhile.
    let taken = peak(&service.process) - before;
    assert!(
        taken < 2 * (63 << 20) + (28 << 20),
        "{taken} bytes for three chats"
    );
}

#[test]
fn a_stopping_service_refuses_new_requests_while_its_answers_end() {
    let mut service = alone();
    let address = http::address(&service.process);
    let ask = |tokens: u32| {
        json!({
            "model": service.model, "stream": true, "max_tokens": tokens, "temperature": 0,
            "messages": [{"role": "user", "content": "Tell me a long story about a lighthouse."}],
        })
    };
    let mut story = Reply::chat(&address, &ask(400));
    assert!(story.event().is_some());
    service.process.signal(Signal::TERM);
    // Requests that arrive before the signal are still answered.
    let mut told = loop {
        let reply = Reply::chat(&address, &ask(1));
        if reply.status != 200 {
            break reply;
        }
    };
    assert_eq!(told.status, 503);
    assert!(told.retry_after.is_some());
    assert!(told.text().contains("shutting_down"));
    assert!(story.event().is_some(), "the answer goes on meanwhile");
    drop(story);
    let status = service.process.child.wait().expect("its end");
    assert_eq!(status.code(), Some(0));
}
