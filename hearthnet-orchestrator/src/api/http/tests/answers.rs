//! Content of answers: text, log-probabilities, usage; whole or streamed.

use super::*;
use crate::api::http::reply::Header;
use crate::chat::{Frame, choice_seed};

#[test]
fn a_plain_answer_has_openais_shape() {
    let house = open();
    let reply = house.chat(json!({}));
    let value = reply.json();
    assert_eq!(
        (reply.status, &value["object"]),
        (200, &json!("chat.completion"))
    );
    assert!(value["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert!(value["created"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(value["model"], "tiny");
    let weights = house.fixture.service.models()[0].weights.to_string();
    assert_eq!(
        value["system_fingerprint"],
        format!("fp_{}", &weights[..16])
    );
    let choice = &value["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(
        (&choice["finish_reason"], &choice["logprobs"]),
        (&json!("length"), &Value::Null)
    );
    let usage = &value["usage"];
    assert_eq!(usage["completion_tokens"], 12);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    let sum = usage["prompt_tokens"].as_u64().unwrap() + 12;
    assert_eq!(usage["total_tokens"], sum);
}

#[test]
fn a_stream_says_the_same_as_a_plain_answer() {
    let house = open();
    let plain = house.chat(json!({})).json();
    let extra = json!({"stream": true, "stream_options": {"include_usage": true}});
    let chunks = house.chat(extra).chunks();
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(plain["choices"][0]["message"]["content"], text);
    let [.., end, counts] = &chunks[..] else {
        panic!("at least two chunks")
    };
    assert_eq!(end["choices"][0]["finish_reason"], "length");
    assert_eq!(counts["choices"], json!([]));
    assert_eq!(counts["usage"]["completion_tokens"], 12);
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], chunks[0]["id"]);
    }
    assert!(chunks[1]["usage"].is_null() && chunks[1].get("usage").is_some());
    // Without `include_usage` there are no counts.
    let chunks = house.chat(json!({"stream": true})).chunks();
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[test]
fn the_same_seed_says_the_same_and_another_does_not() {
    let house = open();
    let say = |seed: i64| {
        let extra = json!({"temperature": 1.5, "seed": seed, "max_tokens": 24});
        house.chat(extra).json()["choices"][0]["message"]["content"].clone()
    };
    assert_eq!(say(-7), say(-7));
    assert_ne!(say(-7), say(8));
}

/// Bytes spelt by entries of log-probabilities.
fn spelt(content: &[Value]) -> String {
    let bytes: Vec<u8> = content
        .iter()
        .flat_map(|entry| entry["bytes"].as_array().unwrap())
        .map(|byte| byte.as_u64().unwrap() as u8)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn the_tokens_of_logprobs_spell_the_answer_whole_or_streamed() {
    let house = open();
    let extra = json!({"logprobs": true, "top_logprobs": 3});
    let value = house.chat(extra).json();
    let choice = &value["choices"][0];
    let content = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(choice["message"]["content"], spelt(content));
    for entry in content {
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        // Greedy sampling takes the most likely token.
        assert_eq!(
            (&top[0]["bytes"], &top[0]["logprob"]),
            (&entry["bytes"], &entry["logprob"])
        );
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
    }
    let extra = json!({"logprobs": true, "top_logprobs": 3, "stream": true});
    let chunks = house.chat(extra).chunks();
    let streamed: Vec<Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(&streamed, content);
}

#[test]
fn a_stop_text_and_its_tokens_are_no_part_of_the_answer() {
    let house = open();
    let tokens = |value: &Value| {
        let logprobs = &value["choices"][0]["logprobs"];
        logprobs["content"].as_array().unwrap().len()
    };
    let all = house.chat(json!({"logprobs": true})).json();
    let text = all["choices"][0]["message"]["content"].as_str().unwrap();
    // A character in the middle that has not occurred before.
    let (at, stop) = text
        .char_indices()
        .filter(|(at, c)| *at > 2 && text.find(*c) == Some(*at))
        .nth(1)
        .expect("a new character");
    for stop in [
        json!(stop.to_string()),
        json!(["never said", stop.to_string()]),
    ] {
        let value = house.chat(json!({"stop": stop, "logprobs": true})).json();
        let choice = &value["choices"][0];
        assert_eq!(choice["message"]["content"], text[..at]);
        assert_eq!(choice["finish_reason"], "stop");
        assert!(tokens(&value) < tokens(&all));
    }
}

#[test]
fn completions_continue_text_or_tokens_with_the_older_logprobs() {
    let house = open();
    let model = &house.fixture.service.models()[0];
    let special = hearthnet_tokens::Special::Plain;
    let ids = model.text.tokenizer.encode("hello hello", special).unwrap();
    let ask = |prompt: Value| {
        let body = json!({
            "model": "tiny", "prompt": prompt, "temperature": 0, "logprobs": 2, "max_tokens": 9,
        });
        house.post("/v1/completions", &body).json()
    };
    let value = ask(json!("hello hello"));
    assert_eq!(value["object"], "text_completion");
    let choice = &value["choices"][0];
    let logprobs = &choice["logprobs"];
    let count = logprobs["tokens"].as_array().unwrap().len();
    for list in ["token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().unwrap().len(), count, "{list}");
    }
    assert_eq!(count, 9);
    assert_eq!(logprobs["text_offset"][0], 0);
    assert!(logprobs["top_logprobs"][0].as_object().unwrap().len() <= 2);
    assert_eq!(ask(json!(ids))["choices"][0]["text"], choice["text"]);
    let body = json!({
        "model": "tiny", "prompt": "hello hello", "temperature": 0, "max_tokens": 9, "stream": true,
    });
    let chunks = house.post("/v1/completions", &body).chunks();
    let text: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(choice["text"], text);
}

#[test]
fn a_text_offset_counts_characters_of_the_text_and_not_of_names_of_bytes() {
    let house = open();
    let model = &house.fixture.service.models()[0];
    let tokenizer = &model.text.tokenizer;
    let text = "日本語 😀 é x";
    // The tokens of this model are single bytes.
    let ids = tokenizer
        .encode(text, hearthnet_tokens::Special::Plain)
        .unwrap();
    assert!(ids.len() >= text.len());
    let header = Header {
        shape: Shape::Text,
        id: 1,
        created: 1,
        model: model.id.clone(),
        weights: model.weights,
    };
    let mut reply = reply::Reply::new(header, tokenizer.clone(), false, true);
    let mut speller = hearthnet_tokens::Detokenizer::continuing(tokenizer);
    let (mut said, mut offsets) = (String::new(), Vec::new());
    for id in ids {
        let before = said.chars().count();
        let delta = Frame::TokenDelta {
            choice: 0,
            text: speller.push(id),
            reasoning: String::new(),
            tool_calls: Vec::new(),
            token_id: id,
            logprob: Some(-1.0),
            top_logprobs: Vec::new(),
        };
        let chunks = reply.chunks(0, &delta);
        let Frame::TokenDelta { text, .. } = delta else {
            unreachable!()
        };
        said.push_str(&text);
        let of_chunks = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["logprobs"]["text_offset"].as_array())
            .flatten();
        // All tokens of a character have its offset.
        offsets.extend(of_chunks.map(|offset| (offset.clone(), json!(before))));
    }
    assert_eq!(said.trim_start(), text);
    assert!(offsets.len() >= text.len());
    for (offset, expected) in offsets {
        assert_eq!(offset, expected);
    }
}

#[test]
fn the_next_turn_says_how_much_was_cached() {
    let house = open();
    let first = house.chat(json!({})).json();
    let answer = first["choices"][0]["message"]["content"].clone();
    let messages = json!([
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": answer},
        {"role": "user", "content": "more"},
    ]);
    let second = house.chat(json!({"messages": messages})).json();
    let cached = &second["usage"]["prompt_tokens_details"]["cached_tokens"];
    let asked = first["usage"]["prompt_tokens"].as_u64();
    assert!(cached.as_u64().unwrap() >= asked.unwrap(), "{cached}");
    // The cache must not reveal another user's prompt.
    let other = json!({"messages": messages, "user": "other"});
    let other = house.chat(other).json();
    assert_eq!(other["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let content = |value: &Value| value["choices"][0]["message"]["content"].clone();
    assert_eq!(content(&other), content(&second));
}

/// Texts and reasons of the answers in the chunks of a stream, by index. `name`: path of the text.
fn by_index(chunks: &[Value], name: &str, count: usize) -> Vec<(String, Value)> {
    let mut all = vec![(String::new(), Value::Null); count];
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        let (text, reason) = &mut all[choice["index"].as_u64().unwrap() as usize];
        assert!(reason.is_null(), "nothing follows the end of an answer");
        text.push_str(choice.pointer(name).and_then(Value::as_str).unwrap_or(""));
        *reason = choice["finish_reason"].clone();
    }
    all
}

#[test]
fn several_choices_are_those_of_their_seeds_whole_or_streamed() {
    let house = open();
    let whole = house.chat(json!({"temperature": 1.5, "seed": 5, "n": 3}));
    let whole = whole.json();
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    let mut generated = 0;
    for (index, choice) in choices.iter().enumerate() {
        let seed = choice_seed(5, index as u32);
        let alone = house.chat(json!({"temperature": 1.5, "seed": seed})).json();
        assert_eq!(choice["index"], index);
        assert_eq!(choice["message"], alone["choices"][0]["message"]);
        generated += alone["usage"]["completion_tokens"].as_u64().unwrap();
        let prompt = &alone["usage"]["prompt_tokens"];
        assert_eq!(whole["usage"]["prompt_tokens"], *prompt);
    }
    assert_eq!(whole["usage"]["completion_tokens"], generated);
    let streamed = house.chat(json!({
        "temperature": 1.5, "seed": 5, "n": 3, "stream": true,
        "stream_options": {"include_usage": true},
    }));
    let chunks = streamed.chunks();
    let counts = chunks.iter().filter(|chunk| !chunk["usage"].is_null());
    assert_eq!(counts.count(), 1);
    let usage = &chunks.last().unwrap()["usage"];
    assert_eq!(usage["completion_tokens"], generated);
    let streamed = by_index(&chunks, "/delta/content", 3);
    for (choice, (text, reason)) in choices.iter().zip(streamed) {
        assert_eq!(choice["message"]["content"], text);
        assert_eq!(choice["finish_reason"], reason);
    }
}

#[test]
fn every_prompt_of_a_list_has_its_answers_in_order() {
    let house = open();
    let texts = [
        "hello hello",
        "good day",
        "hello",
        "once upon",
        "a time",
        "x",
    ];
    let ask = |prompt: Value, stream: bool| {
        let body = json!({
            "model": "tiny", "prompt": prompt, "temperature": 1.2, "seed": 3, "n": 2,
            "max_tokens": 6, "stream": stream,
        });
        house.post("/v1/completions", &body)
    };
    let whole = ask(json!(texts), false).json();
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2 * texts.len());
    let (mut tokens, mut index) = (0, 0);
    for text in texts {
        let alone = ask(json!(text), false).json();
        for choice in alone["choices"].as_array().unwrap() {
            assert_eq!(choices[index]["index"], index);
            assert_eq!(choices[index]["text"], choice["text"]);
            index += 1;
        }
        tokens += alone["usage"]["total_tokens"].as_u64().unwrap();
    }
    assert_eq!(whole["usage"]["total_tokens"], tokens);
    let streamed = by_index(&ask(json!(texts), true).chunks(), "/text", index);
    for (choice, (text, reason)) in choices.iter().zip(streamed) {
        assert_eq!(
            (&choice["text"], &choice["finish_reason"]),
            (&json!(text), &reason)
        );
    }
}

#[test]
fn an_echo_has_the_prompt_and_its_log_probabilities() {
    let house = open();
    let model = &house.fixture.service.models()[0];
    let special = hearthnet_tokens::Special::Plain;
    let ids = model.text.tokenizer.encode("hello hello", special).unwrap();
    let ask = |extra: Value| {
        let body = json!({"model": "tiny", "prompt": ids, "temperature": 0, "max_tokens": 3});
        house.post("/v1/completions", &with(body, extra))
    };
    let plain = ask(json!({})).json()["choices"][0]["text"].clone();
    let prompt = model.text.tokenizer.decode(&ids);
    let both = format!("{prompt}{}", plain.as_str().unwrap());
    let echoed = ask(json!({"echo": true})).json();
    assert_eq!(echoed["choices"][0]["text"], both);
    let scored = ask(json!({"echo": true, "logprobs": 2})).json();
    let choice = &scored["choices"][0];
    assert_eq!(choice["text"], both);
    let logprobs = &choice["logprobs"];
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(
            logprobs[list].as_array().unwrap().len(),
            ids.len() + 3,
            "{list}"
        );
    }
    assert!(logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null());
    for (token, top) in logprobs["token_logprobs"].as_array().unwrap()[1..]
        .iter()
        .zip(&logprobs["top_logprobs"].as_array().unwrap()[1..])
    {
        let best = top.as_object().unwrap().values();
        let best = best.map(|p| p.as_f64().unwrap()).fold(f64::MIN, f64::max);
        assert!(token.as_f64().unwrap() <= best);
    }
    assert_eq!(logprobs["text_offset"][ids.len()], prompt.chars().count());
    // The prompt alone, as programs ask that score texts.
    let alone = ask(json!({"echo": true, "logprobs": 2, "max_tokens": 0})).json();
    let alone = &alone["choices"][0];
    assert_eq!(
        (&alone["text"], &alone["finish_reason"]),
        (&json!(prompt), &json!("length"))
    );
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let all = logprobs[list].as_array().unwrap();
        assert_eq!(alone["logprobs"][list], json!(all[..ids.len()]), "{list}");
    }
    let streamed = ask(json!({"echo": true, "logprobs": 2, "stream": true})).chunks();
    assert_eq!(by_index(&streamed, "/text", 1)[0].0, both);
    let tokens = streamed
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["token_logprobs"].as_array());
    let tokens: Vec<&Value> = tokens.flatten().collect();
    assert_eq!(json!(tokens), logprobs["token_logprobs"]);
    let streamed = ask(json!({"echo": true, "stream": true})).chunks();
    assert_eq!(by_index(&streamed, "/text", 1)[0].0, both);
}

#[test]
fn a_bias_rules_a_token_out_and_no_limit_is_the_context() {
    let house = open();
    let tokens = |extra: Value| house.chat(extra).json();
    let first = tokens(json!({"max_tokens": 1, "logprobs": true}));
    let bytes = &first["choices"][0]["logprobs"]["content"][0]["bytes"];
    let tokenizer = &house.fixture.service.models()[0].text.tokenizer;
    let bytes: Vec<u8> = serde_json::from_value(bytes.clone()).unwrap();
    let id = (0..).find(|id| tokenizer.token_bytes(*id) == Some(&bytes[..]));
    let banned = json!({id.unwrap().to_string(): -100});
    let other = tokens(json!({"max_tokens": 1, "logprobs": true, "logit_bias": banned}));
    let other = &other["choices"][0]["logprobs"]["content"][0]["bytes"];
    assert_ne!(*other, json!(bytes));
    let nothing = tokens(json!({"max_tokens": 0}));
    assert_eq!(nothing["choices"][0]["message"]["content"], "");
    assert_eq!(nothing["choices"][0]["finish_reason"], "length");
    assert_eq!(nothing["usage"]["completion_tokens"], 0);
    let all = tokens(json!({"max_completion_tokens": -1}))["usage"].clone();
    let room = 257 - all["prompt_tokens"].as_u64().unwrap();
    assert!((13..=room).contains(&all["completion_tokens"].as_u64().unwrap()));
}

#[test]
fn the_oldest_turns_are_left_out_if_the_request_says_so() {
    let house = open();
    let turn = |number: usize| {
        let (asked, said) = (format!("question {number} of many"), "an answer ".repeat(3));
        [
            json!({"role": "user", "content": asked}),
            json!({"role": "assistant", "content": said}),
        ]
    };
    let system = json!({"role": "system", "content": "Be brief."});
    let last = json!({"role": "user", "content": "the last question"});
    let from = |first: usize| {
        let mut messages = vec![system.clone()];
        messages.extend((first..8).flat_map(turn));
        messages.push(last.clone());
        json!(messages)
    };
    let refused = house.chat(json!({"messages": from(0)})).error();
    assert_eq!(refused.1, "context_length_exceeded");
    let auto = house.chat(json!({"messages": from(0), "truncation": "auto"}));
    let auto = auto.json();
    // As few turns as possible are left out.
    let fits = |value: &Value| {
        value["usage"]["prompt_tokens"]
            .as_u64()
            .is_some_and(|n| n <= 244)
    };
    let mut shorter = (1..=8).map(|first| house.chat(json!({"messages": from(first)})).json());
    let expected = shorter.find(fits).expect("the last turn fits");
    assert_eq!(
        auto["choices"][0]["message"],
        expected["choices"][0]["message"]
    );
    assert_eq!(
        auto["usage"]["prompt_tokens"],
        expected["usage"]["prompt_tokens"]
    );
    // The same of OpenAI's Responses.
    let body = json!({
        "model": "tiny", "input": from(0), "truncation": "auto", "temperature": 0,
        "max_output_tokens": 12,
    });
    let response = house.post("/v1/responses", &body).json();
    assert_eq!(
        response["usage"]["input_tokens"],
        auto["usage"]["prompt_tokens"]
    );
    assert_eq!(response["truncation"], "auto");
}

#[test]
fn a_strict_server_refuses_what_others_ignore() {
    let strict = house_with(settings(2, 4, 4), |http| http.strict = true);
    let refused = strict.chat(json!({"store": true})).error();
    assert_eq!(
        refused,
        (400, "unsupported_parameter".into(), "store".into())
    );
    assert_eq!(strict.chat(json!({"user": "u"})).status, 200);
    let other = open();
    assert_eq!(other.chat(json!({"store": true})).status, 200);
    let messages = json!([{"role": "user", "content": "hello"}]);
    for (path, body, ignored) in [
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 2}),
            json!({"service_tier": "auto"}),
        ),
        (
            "/v1/messages/count_tokens",
            json!({"messages": messages}),
            json!({"service_tier": "auto"}),
        ),
        (
            "/v1/responses",
            json!({"input": "hello", "max_output_tokens": 2}),
            json!({"tools": [{"type": "web_search"}]}),
        ),
        (
            "/api/chat",
            json!({"messages": messages, "options": {"num_predict": 2}}),
            json!({"options": {"num_predict": 2, "num_ctx": 64}}),
        ),
        (
            "/api/generate",
            json!({"prompt": "hello", "options": {"num_predict": 2}}),
            json!({"options": {"num_predict": 2, "num_ctx": 64}}),
        ),
        (
            "/api/embed",
            json!({"input": "hello"}),
            json!({"options": {"num_ctx": 64}}),
        ),
        ("/api/show", json!({}), json!({"verbose": true})),
    ] {
        let body = with(body, json!({"model": "tiny"}));
        assert_eq!(strict.post(path, &body).status, 200, "{path}");
        let body = with(body, ignored);
        assert_eq!(strict.post(path, &body).status, 400, "{path}");
        assert_eq!(other.post(path, &body).status, 200, "{path}");
    }
}
