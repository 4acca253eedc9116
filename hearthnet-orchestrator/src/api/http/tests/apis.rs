//! APIs other than OpenAI's completions, and the description of all of them.

use proptest::prelude::*;

use super::*;
use crate::api::http::translate::Stamp;
use crate::api::http::translate::anthropic::{self, Purpose};
use crate::api::http::translate::ollama::Asked;

/// Description of all paths.
fn document() -> Value {
    serde_json::from_str(include_str!("../openapi.json")).unwrap()
}

/// Paths and methods of the description.
fn operations(document: &Value) -> Vec<(String, Vec<String>)> {
    let paths = document["paths"].as_object().unwrap();
    let methods = |path: &Value| {
        let names = path.as_object().unwrap().keys();
        let names = names.filter(|name| *name != "parameters");
        names.map(|name| name.to_uppercase()).collect()
    };
    paths
        .iter()
        .map(|(path, about)| (path.clone(), methods(about)))
        .collect()
}

/// Objects of a stream in lines.
fn lines(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.headers["content-type"], "application/x-ndjson");
    let lines = reply.body.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().unwrap()
}

/// Events of a stream, whose names are those of their objects.
fn named_events(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.headers["content-type"], "text/event-stream");
    let events = reply.body.split("\n\n").filter(|event| !event.is_empty());
    events
        .map(|event| {
            let (name, data) = event.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
            data
        })
        .collect()
}

/// Texts at a place of objects, together.
fn texts<'a>(objects: &'a [Value], at: impl Fn(&'a Value) -> &'a Value) -> String {
    objects
        .iter()
        .filter_map(|object| at(object).as_str())
        .collect()
}

#[test]
fn every_api_gives_the_same_text() {
    let house = open();
    let messages = json!([{"role": "user", "content": "hello"}]);
    let whole = house.chat(json!({})).json();
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!text.is_empty());
    let tokens = &whole["usage"]["completion_tokens"];

    let anthropics = |stream: bool| {
        let body = json!({"model": "tiny", "messages": messages, "max_tokens": 12,
                          "temperature": 0, "stream": stream});
        house.post("/v1/messages", &body)
    };
    let message = anthropics(false).json();
    assert_eq!(message["content"][0]["text"], text);
    assert_eq!(&message["usage"]["output_tokens"], tokens);
    let events = named_events(&anthropics(true));
    assert_eq!(texts(&events, |event| &event["delta"]["text"]), text);
    let counted = house.post(
        "/v1/messages/count_tokens",
        &json!({"model": "tiny", "messages": messages}),
    );
    assert_eq!(
        counted.json()["input_tokens"],
        whole["usage"]["prompt_tokens"]
    );

    let options = json!({"temperature": 0, "num_predict": 12});
    let ollamas = |stream: bool| {
        let body = json!({"model": "tiny:latest", "messages": messages, "options": options,
                          "stream": stream});
        house.post("/api/chat", &body)
    };
    assert_eq!(ollamas(false).json()["message"]["content"], text);
    let objects = lines(&ollamas(true));
    assert_eq!(
        texts(&objects, |object| &object["message"]["content"]),
        text
    );
    let last = objects.last().unwrap();
    assert_eq!(&last["eval_count"], tokens);
    assert!(last["total_duration"].as_u64().unwrap() >= last["eval_duration"].as_u64().unwrap());
    let body = json!({"model": "tiny", "prompt": "hello", "options": options});
    let objects = lines(&house.post("/api/generate", &body));
    assert_eq!(texts(&objects, |object| &object["response"]), text);

    let newer = |stream: bool| {
        let body = json!({"model": "tiny", "input": "hello", "max_output_tokens": 12,
                          "temperature": 0, "stream": stream});
        house.post("/v1/responses", &body)
    };
    let response = newer(false).json();
    assert_eq!(response["output"][0]["content"][0]["text"], text);
    assert_eq!(&response["usage"]["output_tokens"], tokens);
    let events = named_events(&newer(true));
    assert_eq!(texts(&events, |event| &event["delta"]), text);
}

#[test]
fn a_raw_prompt_is_continued_as_by_the_completions() {
    let house = open();
    let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0});
    let whole = house.post("/v1/completions", &body).json();
    let body = json!({"model": "tiny", "prompt": "hello", "raw": true, "stream": false,
                      "options": {"temperature": 0, "num_predict": 8}});
    let raw = house.post("/api/generate", &body).json();
    assert_eq!(raw["response"], whole["choices"][0]["text"]);
}

#[test]
fn anthropics_answer_names_the_stop_text_that_ended_it() {
    let house = open();
    let ask = |stops: Value| {
        let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hello"}],
                          "max_tokens": 12, "temperature": 0, "stop_sequences": stops});
        house.post("/v1/messages", &body).json()
    };
    let text = ask(json!([]))["content"][0]["text"]
        .as_str()
        .unwrap()
        .to_owned();
    // The last character that is not in the text before.
    let (at, stop) = text
        .char_indices()
        .rev()
        .find(|(at, c)| !text[..*at].contains(*c))
        .unwrap();
    let stop = stop.to_string();
    let message = ask(json!(["not there", stop]));
    assert_eq!(message["stop_reason"], "stop_sequence");
    assert_eq!(message["stop_sequence"], stop);
    let before = message["content"][0]["text"].as_str().unwrap_or_default();
    assert_eq!(before, &text[..at]);
}

#[test]
fn a_response_continues_one_of_the_same_caller() {
    let house = open_by_key();
    let send = |path: &str, body: Value| house.post_with(path, &body, BEARER);
    let base = json!({"model": "tiny", "max_output_tokens": 8, "temperature": 0});
    let ask = |extra: Value| send("/v1/responses", with(base.clone(), extra));
    let text = |response: &Value| {
        let text = response["output"][0]["content"][0]["text"].as_str();
        text.unwrap_or_default().to_owned()
    };
    let first = ask(json!({"input": "hello", "user": "a"})).json();
    let next = json!({"input": "go on", "previous_response_id": first["id"], "user": "a"});
    let second = ask(next.clone()).json();
    assert_eq!(second["previous_response_id"], first["id"]);
    let whole = send(
        "/v1/chat/completions",
        json!({"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": text(&first)},
            {"role": "user", "content": "go on"},
        ]}),
    );
    let content = &whole.json()["choices"][0]["message"]["content"];
    assert_eq!(*content, text(&second));

    let mut of_another = next;
    of_another["user"] = json!("b");
    let (status, code, param) = ask(of_another).error();
    assert_eq!(
        (status, code.as_str()),
        (400, "previous_response_not_found")
    );
    assert_eq!(param, "previous_response_id");
    let unstored = ask(json!({"input": "hello", "user": "a", "store": false})).json();
    let next = json!({"input": "x", "user": "a", "previous_response_id": unstored["id"]});
    assert_eq!(ask(next).error().0, 400);
}

#[test]
fn a_model_is_found_by_its_aliases_in_every_api_and_by_default_under_any_name() {
    let with = |aliases: &[(&str, &str)]| {
        house_with(settings(2, 4, 4), |http| {
            let aliases = aliases.iter();
            http.aliases = aliases.map(|(a, b)| ((*a).into(), (*b).into())).collect();
        })
    };
    let house = with(&[("gpt-4.1", "tiny"), ("gone", "other"), ("tiny", "other")]);
    let list = house.get("/v1/models", "").json();
    let listed = list["data"].as_array().unwrap().iter();
    let listed: Vec<_> = listed.map(|it| (&it["id"], &it["alias_of"])).collect();
    let expected = [
        (json!("tiny"), Value::Null),
        (json!("gpt-4.1"), json!("tiny")),
    ];
    assert_eq!(listed, expected.each_ref().map(|(id, of)| (id, of)));
    let tags = house.get("/api/tags", "").json();
    assert_eq!(tags["models"][1]["name"], "gpt-4.1");
    assert_eq!(house.get("/v1/models/gpt-4.1", "").status, 200);

    let messages = json!([{"role": "user", "content": "hello"}]);
    let asks = |model: &str| {
        let short = json!({"model": model, "max_tokens": 4, "temperature": 0});
        let (mut chat, mut text) = (short.clone(), short);
        chat["messages"] = messages.clone();
        text["prompt"] = json!("hello");
        let options = json!({"num_predict": 4, "temperature": 0});
        [
            ("/v1/chat/completions", chat.clone()),
            ("/v1/completions", text),
            ("/v1/messages", chat.clone()),
            (
                "/v1/messages/count_tokens",
                json!({"model": model, "messages": messages}),
            ),
            (
                "/v1/responses",
                json!({"model": model, "input": "hello", "max_output_tokens": 4}),
            ),
            (
                "/api/chat",
                json!({"model": model, "messages": messages, "options": options}),
            ),
            (
                "/api/generate",
                json!({"model": model, "prompt": "hello", "options": options}),
            ),
            ("/api/show", json!({"model": model})),
        ]
    };
    for (path, body) in asks("gpt-4.1") {
        let reply = house.post(path, &body);
        assert_eq!(reply.status, 200, "{path}: {}", reply.body);
        if path == "/v1/chat/completions" {
            let (own, alias) = (house.chat(json!({"max_tokens": 4})).json(), reply.json());
            assert_eq!(alias["model"], "gpt-4.1");
            assert_eq!(alias["choices"][0]["message"], own["choices"][0]["message"]);
            assert_eq!(alias["system_fingerprint"], own["system_fingerprint"]);
        }
    }
    for (path, body) in asks("gpt-4").into_iter().chain(asks("gone")) {
        assert_eq!(house.post(path, &body).status, 404, "{path}");
    }

    let house = with(&[("default", "tiny")]);
    let list = house.get("/v1/models", "").json();
    assert_eq!(list["data"].as_array().map(Vec::len), Some(1));
    for (path, body) in asks("whatever") {
        assert_eq!(house.post(path, &body).status, 200, "{path}");
    }
}

#[test]
fn errors_have_the_format_of_their_api() {
    let house = open();
    let body = json!({"model": "none", "max_tokens": 1,
                      "messages": [{"role": "user", "content": "x"}]});
    let anthropics = house.post("/v1/messages", &body);
    assert_eq!(anthropics.status, 404);
    let error = anthropics.json();
    assert_eq!(
        (&error["type"], &error["error"]["type"]),
        (&json!("error"), &json!("not_found_error"))
    );
    let ollamas = house.post("/api/chat", &body);
    assert_eq!(ollamas.status, 400, "max_tokens is no field of Ollama's");
    let missing = house.post("/api/show", &json!({"model": "none"}));
    assert_eq!(missing.status, 404);
    assert!(missing.json()["error"].is_string());
    // Errors of every layer: the method, and the type of the body.
    let method = house.get("/v1/messages", "");
    assert_eq!(
        (method.status, &method.json()["type"]),
        (405, &json!("error"))
    );
    let text = "Content-Length: 0\r\nContent-Type: text/plain\r\n";
    let kind = house.send("POST /api/chat", "localhost", text);
    assert_eq!(kind.status, 415);
    assert!(kind.json()["error"].is_string());
    // Fields have the names that the client used.
    let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "x"}],
                      "options": {"temperature": 9}});
    let said = house.post("/api/chat", &body).json();
    let said = said["error"].as_str().unwrap();
    assert!(said.contains("`options.temperature`"), "{said}");
    let long = "long ".repeat(300);
    let body = json!({"model": "tiny", "max_tokens": 1,
                      "messages": [{"role": "user", "content": long}]});
    let said = house.post("/v1/messages", &body).json();
    let said = said["error"]["message"].as_str().unwrap();
    // A prompt that is too long still has a number of tokens.
    let counted = house.post("/v1/messages/count_tokens", &body).json();
    let counted = counted["input_tokens"].as_u64().unwrap();
    let context = house.fixture.service.models()[0].text.context;
    assert!(counted > u64::from(context));
    let words = format!("prompt is too long: {counted} tokens > {context} maximum");
    assert_eq!(said, words);
    // A response cannot be read again.
    let kept = house.get("/v1/responses/resp_1", "").error();
    assert_eq!(kept, (404, "response_not_found".into(), String::new()));
}

#[test]
fn ollamas_models_are_those_of_the_service() {
    let house = open();
    let served = &house.fixture.service.models()[0];
    for path in ["/api/tags", "/api/ps"] {
        let models = house.get(path, "").json();
        assert_eq!(models["models"][0]["name"], "tiny", "{path}");
        assert_eq!(models["models"][0]["digest"], served.weights.to_string());
    }
    let shown = house.post("/api/show", &json!({"model": "tiny"})).json();
    let architecture = shown["model_info"]["general.architecture"]
        .as_str()
        .unwrap();
    let context = &shown["model_info"][format!("{architecture}.context_length")];
    assert_eq!(*context, served.text.context);
    let loaded = house
        .post("/api/generate", &json!({"model": "tiny"}))
        .json();
    assert_eq!(loaded["done_reason"], "load");
    assert!(house.get("/api/version", "").json()["version"].is_string());
}

#[test]
fn tokens_of_a_text_are_its_text_again() {
    let house = open();
    let ask = |body: Value| house.post("/tokenize", &body).json();
    let text = "Why share?";
    let whole = ask(json!({"prompt": text}));
    let plain = ask(json!({"prompt": text, "add_special_tokens": false, "model": "tiny"}));
    let count = |tokens: &Value| tokens["tokens"].as_array().map(Vec::len).unwrap();
    assert_eq!(plain["count"], count(&plain));
    assert!(count(&whole) >= count(&plain));
    let back = house.post("/detokenize", &json!({"tokens": plain["tokens"]}));
    assert_eq!(back.json()["prompt"], text);
    // The name of a control token is this token.
    let info = house.get("/tokenizer_info", "").json();
    let end = ask(json!({"prompt": info["eos_token"], "add_special_tokens": false}));
    assert_eq!(end["count"], 1);
    for (path, body) in [
        ("/tokenize", json!({"prompt": 5})),
        ("/tokenize", json!({"prompt": "x", "model": "none"})),
        ("/detokenize", json!({"tokens": [-1]})),
    ] {
        assert!(house.post(path, &body).status >= 400, "{path} {body}");
    }
}

#[test]
fn the_description_lists_every_path_and_every_method() {
    let house = open();
    let document = house.get("/openapi.json", "").json();
    assert_eq!(document, self::document());
    for (path, methods) in operations(&document) {
        // Paths of the page belong to the program, which tests them.
        if path.starts_with("/hearthnet/") {
            continue;
        }
        let at = path.replace("{id}", "tiny");
        for method in ["GET", "POST", "DELETE"] {
            let status = match method {
                "GET" => house.get(&at, "").status,
                "POST" => house.post(&at, &json!({})).status,
                _ => {
                    let line = format!("{method} {at}");
                    house.send(&line, "localhost", "").status
                }
            };
            let expected = match (methods.contains(&method.to_owned()), method) {
                (false, _) => 405,
                // Responses are not kept.
                (true, _) if path == "/v1/responses/{id}" => 404,
                (true, "GET") => 200,
                // A body without fields.
                (true, _) => 400,
            };
            assert_eq!(status, expected, "{method} {path}");
        }
    }
    // Paths in the sources.
    let listed: Vec<String> = operations(&document)
        .into_iter()
        .map(|(path, _)| path)
        .collect();
    for source in [
        include_str!("../mod.rs"),
        include_str!("../../../../../hearthnet/src/page/mod.rs"),
        include_str!("../../../../../crates/hearthnet-http/src/auth.rs"),
    ] {
        let routes = source.split(".route(").skip(1);
        let paths =
            routes.filter_map(|route| route.trim_start().strip_prefix('"')?.split('"').next());
        let paths: Vec<&str> = paths.collect();
        assert!(!paths.is_empty());
        for path in paths {
            assert!(
                listed.iter().any(|listed| listed == path),
                "{path} is not in openapi.json"
            );
        }
    }
}

/// Reads the body of a request as the endpoint does.
fn read(path: &str, body: &Value) -> Result<(), ApiError> {
    let body = body.to_string();
    let body = body.as_bytes();
    let stamp = Stamp {
        random: 1,
        created_ms: 0,
    };
    let rules = Rules::default();
    let translated = match path {
        "/v1/chat/completions" => return request::chat(body, rules).map(drop),
        "/v1/completions" => return request::completion(body, rules).map(drop),
        "/v1/embeddings" => return embeddings::request(body).map(drop),
        "/api/embed" => return ollama::embed(body, VectorFormat::Ollama, rules).map(drop),
        "/api/embeddings" => {
            return ollama::embed(body, VectorFormat::OlderOllama, rules).map(drop);
        }
        "/api/show" => return ollama::shown(body, rules).map(drop),
        "/tokenize" => return vllm::tokenize(body).map(drop),
        "/detokenize" => return vllm::detokenize(body).map(drop),
        "/v1/messages" => anthropic::request(body, Purpose::Answer, stamp, rules)?,
        "/v1/messages/count_tokens" => anthropic::request(body, Purpose::Count, stamp, rules)?,
        "/v1/responses" => responses::request(body, stamp, rules, &|_, _| None)?,
        "/api/chat" | "/api/generate" => {
            let endpoint = match path {
                "/api/chat" => ollama::Endpoint::Chat,
                _ => ollama::Endpoint::Generate,
            };
            match ollama::request(body, endpoint, stamp, rules)? {
                Asked::Answer(translated) => translated,
                Asked::Load(..) => return Ok(()),
            }
        }
        _ => panic!("{path} is not read here"),
    };
    let body = translated.request.to_string();
    match translated.shape {
        Shape::Chat => request::chat(body.as_bytes(), rules).map(drop),
        Shape::Text => request::completion(body.as_bytes(), rules).map(drop),
    }
}

#[test]
fn every_example_of_the_description_is_read() {
    let document = document();
    let mut read_fields = 0;
    for (path, _) in operations(&document) {
        let post = &document["paths"][&path]["post"];
        let schema = &post["requestBody"]["content"]["application/json"]["schema"]["$ref"];
        let Some(name) = schema.as_str().and_then(|name| name.rsplit('/').next()) else {
            continue;
        };
        if path.starts_with("/hearthnet/") {
            continue;
        }
        let schema = &document["components"]["schemas"][name];
        let needed = schema["required"].as_array().unwrap();
        let mut base = json!({});
        for name in needed {
            let name = name.as_str().unwrap();
            base[name] = schema["properties"][name]["examples"][0].clone();
        }
        for (name, property) in schema["properties"].as_object().unwrap() {
            let Some(example) = property["examples"].get(0) else {
                continue;
            };
            let mut body = base.clone();
            body[name] = example.clone();
            let refused = read(&path, &body).err().map(|error| error.body());
            assert_eq!(refused, None, "{path}: {name}");
            read_fields += 1;
        }
        // A field that is not in the list is refused.
        let mut body = base.clone();
        body["temprature"] = json!(1);
        assert!(read(&path, &body).is_err(), "{path}");
    }
    assert!(read_fields > 60, "{read_fields}");
}

/// Requests in the shapes that programs send which `tests/clients/table` does not run, as their sources
/// write them (specs/http-api.md 14).
#[test]
fn requests_of_programs_that_are_not_run_are_read() {
    let schema = json!({"type": "object", "properties": {"area": {"type": "string"}}});
    let function = json!({"name": "turn_on", "description": "d", "parameters": schema});
    let tool = json!({"type": "function", "function": function});
    let call = json!({"id": "c1", "type": "function",
                      "function": {"name": "turn_on", "arguments": "{}"}});
    let text = json!([{"type": "text", "text": "t"}]);
    let ollamas = |assistant: Value, result: Value| {
        json!([{"role": "system", "content": "t"}, {"role": "user", "content": "t"},
               assistant, result])
    };
    let called = json!([{"function": {"name": "turn_on", "arguments": {"area": "hall"}}}]);
    for (program, path, body) in [
        (
            "Zed, OpenAI's API",
            "/v1/chat/completions",
            json!({
                "messages": [
                    {"role": "system", "content": text}, {"role": "user", "content": text},
                    {"role": "assistant", "content": null, "tool_calls": [call],
                     "reasoning_content": "t"},
                    {"role": "tool", "content": text, "tool_call_id": "c1"},
                ],
                "stream": true, "stream_options": {"include_usage": true}, "stop": [],
                "temperature": 1.0, "max_completion_tokens": 8192, "parallel_tool_calls": false,
                "prompt_cache_key": "k", "tools": [tool], "tool_choice": "auto",
                "reasoning_effort": "medium",
            }),
        ),
        (
            "Zed, Responses",
            "/v1/responses",
            json!({
                "input": [
                    {"type": "message", "role": "user",
                     "content": [{"type": "input_text", "text": "t"}]},
                    {"type": "message", "role": "assistant",
                     "content": [{"type": "output_text", "text": "t", "annotations": []}]},
                    {"type": "function_call", "call_id": "c1", "name": "turn_on",
                     "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c1", "output": "t"},
                ],
                "stream": true, "temperature": 1.0, "parallel_tool_calls": false,
                "tools": [{"type": "function", "name": "turn_on", "description": "d",
                           "parameters": schema}],
                "prompt_cache_key": "k", "reasoning": {"effort": "medium", "summary": "auto"},
            }),
        ),
        (
            "Zed, Ollama's API",
            "/api/chat",
            json!({
                "messages": ollamas(
                    json!({"role": "assistant", "content": "", "tool_calls": called,
                           "thinking": null}),
                    json!({"role": "tool", "tool_name": "turn_on", "content": "t"}),
                ),
                "stream": true, "keep_alive": -1, "tools": [], "think": false,
                "options": {"num_ctx": 8192, "num_predict": null, "stop": [], "temperature": 1.0,
                            "top_p": null},
            }),
        ),
        (
            "Home Assistant",
            "/api/chat",
            json!({
                "messages": ollamas(
                    json!({"role": "assistant", "content": "", "tool_calls": called,
                           "thinking": "t"}),
                    json!({"role": "tool", "content": "{}"}),
                ),
                "stream": true, "keep_alive": "-1s", "tools": [tool], "think": false,
                "options": {"num_ctx": 8192}, "format": schema,
            }),
        ),
        (
            "Open WebUI, OpenAI's API",
            "/v1/chat/completions",
            json!({
                "messages": [
                    {"role": "system", "content": "t"}, {"role": "user", "content": text},
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "content": "t"},
                ],
                "stream": true, "stream_options": {"include_usage": true}, "tools": [tool],
                "temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "max_tokens": 100, "seed": 1,
                "frequency_penalty": 0.1, "presence_penalty": 0.1, "stop": ["x"],
                "reasoning_effort": "low", "logit_bias": {"5": -100},
                "response_format": {"type": "json_object"},
            }),
        ),
        (
            "Open WebUI, Ollama's API",
            "/api/chat",
            json!({
                "messages": ollamas(
                    json!({"role": "assistant", "content": "t", "thinking": "t"}),
                    json!({"role": "user", "content": "t"}),
                ),
                "stream": true, "keep_alive": "5m", "think": true,
                "options": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 1,
                            "num_ctx": 4096, "num_predict": 100, "num_keep": 5, "num_batch": 512,
                            "num_gpu": 1, "num_thread": 4, "use_mmap": true, "use_mlock": false,
                            "repeat_last_n": 64, "repeat_penalty": 1.1, "mirostat": 0,
                            "mirostat_eta": 0.1, "mirostat_tau": 5.0, "stop": ["x"]},
            }),
        ),
    ] {
        let mut body = body;
        body["model"] = json!("m");
        let refused = read(path, &body).err().map(|error| error.body());
        assert_eq!(refused, None, "{program}");
    }
}

proptest! {
    #[test]
    fn no_value_of_any_field_makes_a_translation_panic(
        path in prop::sample::select(&[
            "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/api/chat",
            "/api/generate", "/api/show", "/v1/embeddings", "/api/embed", "/api/embeddings",
            "/tokenize", "/detokenize",
        ][..]),
        name in prop::sample::select(&[
            "model", "messages", "system", "tools", "tool_choice", "thinking", "output_config",
            "metadata", "stop_sequences", "stream", "input", "instructions", "text", "reasoning",
            "previous_response_id", "store", "options", "format", "think", "prompt", "raw",
            "context", "images", "keep_alive", "user", "dimensions", "truncate", "encoding_format",
            "tokens", "add_special_tokens",
        ][..]),
        value in prop::sample::select(vec![
            json!(null), json!(true), json!(-1), json!(1e300), json!(u64::MAX), json!(""),
            json!([]), json!({}), json!([[]]), json!([{}]), json!({"type": {}}), json!("\u{0}"),
            json!([{"type": "function_call", "call_id": "c", "name": "n", "arguments": "{"}]),
            json!([{"type": "message", "role": "assistant", "content": []}]),
            json!([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]),
            json!([{"role": "tool", "content": ""}, {"role": "assistant", "tool_calls": [{}]}]),
            json!({"format": {"type": "json_schema"}}), json!({"effort": []}),
            json!({"stop": {}, "num_predict": "all", "mirostat": "off"}),
        ]),
    ) {
        let mut body = json!({
            "model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}],
        });
        body[name] = value;
        let _ = read(path, &body);
    }
}
