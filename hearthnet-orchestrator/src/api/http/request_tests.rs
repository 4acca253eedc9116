use hearthnet_tokens::Role;
use proptest::prelude::*;

use super::super::fields::tests::{STRICT, refusal};
use super::*;
use crate::api::fields;
use crate::api::fields::tests::cases;

const RULES: Rules = Rules {
    seed: 99,
    strict: false,
};

fn base() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
}

fn with(extra: Value) -> Result<ApiRequest, ApiError> {
    let body = fields::with(base(), extra);
    chat(body.to_string().as_bytes(), RULES)
}

/// List of one message.
fn one(role: &str, content: Value) -> Value {
    json!([{"role": role, "content": content}])
}

#[test]
fn defaults_are_openais_and_the_models() {
    let request = with(json!({"top_k": null})).unwrap();
    assert!(request.chosen.is_empty());
    let s = &request.chat.sampling;
    assert_eq!((s.seed, s.logprobs), (Some(99), None));
    assert!(!request.stream && !request.include_usage);
    assert_eq!(request.chat.max_tokens, None);
    let text = completion(br#"{"model": "m", "prompt": "p"}"#, RULES).unwrap();
    assert_eq!(text.chat.max_tokens, Some(16));
}

#[test]
fn every_supported_field_is_read() {
    let request = with(json!({
        "temperature": 0.5, "top_p": 0.9, "seed": -1, "max_tokens": 7,
        "max_completion_tokens": 9, "stop": ["a", "b"], "presence_penalty": -1,
        "frequency_penalty": 1.5, "logprobs": true, "top_logprobs": 3, "stream": true,
        "stream_options": {"include_usage": true}, "n": 1, "user": "someone",
        "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1,
    }))
    .unwrap();
    let s = request.chosen.over(request.chat.sampling);
    assert_eq!((s.temperature, s.top_p, s.top_k), (0.5, 0.9, 4));
    assert_eq!((s.presence_penalty, s.frequency_penalty), (-1.0, 1.5));
    assert_eq!((s.seed, s.logprobs), (Some(u64::MAX), Some(3)));
    assert_eq!((s.penalty_window, s.penalise_prompt), (1 << 20, false));
    assert_eq!((s.min_p, s.repetition_penalty), (0.1, 1.1));
    assert_eq!(request.chat.max_tokens, Some(9));
    assert_eq!(request.chat.stop, ["a", "b"]);
    assert!(request.stream && request.include_usage);
    assert_eq!(request.user.as_deref(), Some("someone"));
}

#[test]
fn text_comes_whole_or_in_parts_from_every_role() {
    let messages = json!([
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": null, "refusal": null, "name": "x",
         "audio": null, "annotations": []},
    ]);
    let request = with(json!({"messages": messages})).unwrap();
    let Prompt::Messages(messages) = request.chat.prompt else {
        panic!("messages")
    };
    let read = messages
        .iter()
        .map(|m| (m.role.into_str(), m.content.as_str()));
    let read: Vec<String> = read.map(|(role, text)| format!("{role}: {text}")).collect();
    assert_eq!(read, ["system: s", "system: d", "user: ab", "assistant: c"]);
}

#[test]
fn calls_and_results_are_read() {
    let call = |arguments: Value| {
        json!({"id": "c1", "type": "function",
               "function": {"name": "f", "arguments": arguments}})
    };
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "reasoning_content": "r",
         "tool_calls": [call(json!("{\"a\": 1}")), call(json!({"a": 1}))]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
    ]);
    let request = with(json!({"messages": messages})).unwrap();
    let Prompt::Messages(messages) = request.chat.prompt else {
        panic!("messages")
    };
    assert_eq!(messages[1].content, "");
    assert_eq!(messages[1].reasoning_content.as_deref(), Some("r"));
    let calls = &messages[1].tool_calls;
    assert_eq!(calls[0].arguments, "{\"a\": 1}");
    assert_eq!(calls[1].arguments, "{\"a\":1}");
    assert_eq!(messages[2].tool_call_id.as_deref(), Some("c1"));
    assert_eq!(
        (messages[2].role, messages[2].content.as_str()),
        (Role::Tool, "7")
    );
}

#[test]
fn fields_without_effect_and_empty_fields_are_ignored() {
    with(json!({
        "metadata": {"a": "b"}, "store": true, "service_tier": "auto", "tools": [],
        "logit_bias": {}, "truncation": "disabled", "response_format": {"type": "text"}, "tool_choice": "none",
        "modalities": ["text"], "reasoning_effort": null, "whatever": null,
    }))
    .unwrap();
}

#[test]
fn unsupported_fields_are_refused_by_name() {
    for (field, value, param) in [
        ("tools", json!([{"type": "web_search"}]), "[0].type"),
        ("functions", json!([{}]), ""),
        ("response_format", json!({"type": "yaml"}), ".type"),
        ("modalities", json!(["text", "audio"]), ""),
        ("temprature", json!(0.1), ""),
        ("messages", one("function", json!("x")), "[0].role"),
        (
            "messages",
            one("user", json!([{"type": "image_url"}])),
            "[0].content[0].type",
        ),
    ] {
        let refused = refusal(with(json!({field: value})));
        let expected = ("unsupported_parameter".into(), format!("{field}{param}"));
        assert_eq!(refused, expected);
    }
    let best_of = br#"{"model": "m", "prompt": "p", "n": 2, "best_of": 3}"#;
    assert_eq!(refusal(completion(best_of, RULES)).1, "best_of");
}

#[test]
fn values_out_of_range_name_their_field() {
    for (field, value, param) in [
        ("temperature", json!(2.1), ""),
        ("temperature", json!("warm"), ""),
        ("top_p", json!(-0.1), ""),
        ("max_tokens", json!(-2), ""),
        ("n", json!(0), ""),
        ("n", json!(9), ""),
        ("logit_bias", json!({"5": 100.5}), ""),
        ("logit_bias", json!({"x": 1}), ""),
        ("logit_bias", json!([1]), ""),
        ("truncation", json!("some"), ""),
        ("max_completion_tokens", json!(1.5), ""),
        ("stop", json!(vec!["a"; 17]), ""),
        ("stop", json!(""), ""),
        ("stop", json!([1]), ""),
        ("seed", json!(1.5), ""),
        ("top_logprobs", json!(1), ""),
        ("stream", json!("yes"), ""),
        ("stream_options", json!({"include_usage": true}), ""),
        ("messages", json!([]), ""),
        ("messages", json!("hi"), ""),
        ("messages", json!(["hi"]), "[0]"),
        ("messages", json!([{"role": "user"}]), "[0].content"),
        ("messages", one("king", json!("")), "[0].role"),
        ("model", json!(5), ""),
        ("user", json!(5), ""),
        ("tools", json!([{"type": "function"}]), "[0].function"),
        ("tool_choice", json!("required"), ""),
        ("reasoning_effort", json!("huge"), ""),
        ("messages", one("tool", json!("x")), "[0].tool_call_id"),
        (
            "messages",
            json!([{"role": "assistant", "content": "", "tool_calls": [1]}]),
            "[0].tool_calls[0]",
        ),
        ("response_format", json!("json"), ""),
        ("structured_outputs", json!({"regex": 5}), ".regex"),
    ] {
        let refused = refusal(with(json!({field: value})));
        assert_eq!(refused, ("invalid_value".into(), format!("{field}{param}")));
    }
    for (extra, param) in cases::<(Value, String)>(json!([
        [{"logprobs": true, "top_logprobs": 21}, "top_logprobs"],
        [{"stream": true, "stream_options": {"other": 1}}, "stream_options"],
    ])) {
        assert_eq!(refusal(with(extra)), ("invalid_value".into(), param));
    }
}

#[test]
fn top_k_is_a_number_of_tokens_and_0_and_minus_1_are_all() {
    for (given, is) in [
        (json!(40), 40),
        (json!(0), 0),
        (json!(-1), 0),
        (json!(u32::MAX), u32::MAX),
    ] {
        let request = with(json!({"top_k": given})).unwrap();
        assert_eq!(request.chosen.top_k, Some(is));
    }
    for wrong in [json!(-2), json!(1_u64 << 32), json!(1.5), json!("-1")] {
        let said = with(json!({"top_k": wrong}))
            .unwrap_err()
            .body()
            .to_string();
        let range = "from 1 to 4294967295, or 0 or -1 for all";
        assert!(said.contains(range), "{said}");
    }
}

#[test]
fn a_seed_has_64_bits_and_a_refusal_names_the_range() {
    for seed in [json!(u64::MAX), json!(i64::MIN), json!(0)] {
        assert!(with(json!({"seed": seed})).is_ok());
    }
    let wrong = "18446744073709551616 -9223372036854775809 1.5 \"7\"";
    for wrong in wrong.split(' ') {
        let body = format!(r#"{{"model": "m", "prompt": "p", "seed": {wrong}}}"#);
        let refused = completion(body.as_bytes(), RULES).unwrap_err();
        let said = refused.body().to_string();
        let range = "from -9223372036854775808 to 18446744073709551615";
        assert!(said.contains(range), "{said}");
    }
}

#[test]
fn limits_of_tokens_may_be_none_and_0() {
    for (given, limit) in [
        (json!({"max_tokens": 0}), Some(0)),
        (json!({"max_tokens": -1}), None),
        (json!({"max_tokens": u64::MAX}), Some(u32::MAX)),
        (json!({"max_completion_tokens": -1, "max_tokens": 5}), None),
        (
            json!({"max_completion_tokens": 0, "max_tokens": 5}),
            Some(0),
        ),
    ] {
        assert_eq!(with(given).unwrap().chat.max_tokens, limit);
    }
    let body = br#"{"model": "m", "prompt": "p", "max_tokens": -1}"#;
    assert_eq!(completion(body, RULES).unwrap().chat.max_tokens, None);
}

#[test]
fn choices_biases_and_truncation_are_read() {
    let request = with(json!({
        "n": 8, "logit_bias": {"10": -100, "9": 0.5, "09": 0.5}, "truncation": "auto",
    }));
    let chat = request.unwrap().chat;
    assert_eq!((chat.options.choices, chat.options.drop_oldest), (8, true));
    assert_eq!(chat.sampling.logit_bias, [(9, 0.5), (10, -100.0)]);
    let body = br#"{"model": "m", "prompt": "p", "n": 2, "best_of": 2}"#;
    assert_eq!(completion(body, RULES).unwrap().chat.options.choices, 2);
}

#[test]
fn a_message_of_the_assistant_may_be_empty() {
    let messages = json!([
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": null},
        {"role": "assistant"},
    ]);
    let Prompt::Messages(messages) = with(json!({"messages": messages})).unwrap().chat.prompt
    else {
        panic!("messages")
    };
    assert_eq!([&messages[1].content, &messages[2].content], ["", ""]);
}

#[test]
fn a_strict_server_names_the_field_that_it_would_ignore() {
    let asked = |name: &str, value: Value| {
        let mut body = base();
        body["stream"] = json!(true);
        body[name] = value;
        chat(body.to_string().as_bytes(), STRICT)
    };
    asked("user", json!("u")).unwrap();
    for name in IGNORED {
        let refused = refusal(asked(name, json!("x")));
        assert_eq!(refused, ("unsupported_parameter".into(), (*name).into()));
        with(json!({ (*name): "x" })).unwrap();
    }
    let named = json!([{"role": "user", "content": "hi", "name": "n"}]);
    let (_, param) = refusal(asked("messages", named));
    assert_eq!(param, "messages[0].name");
    let padding = json!({"include_obfuscation": true});
    let refused = refusal(asked("stream_options", padding));
    let at = "stream_options.include_obfuscation";
    assert_eq!(refused, ("unsupported_parameter".into(), at.into()));
    let call = |call: Value, function: Value| {
        let function = fields::with(json!({"name": "f", "arguments": "{}"}), function);
        let made = json!({"id": "c", "type": "function", "function": function});
        json!({"role": "assistant", "tool_calls": [fields::with(made, call)]})
    };
    let part = json!({"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}});
    for (message, param) in [
        (
            json!({"role": "user", "content": "hi", "tools": []}),
            "tools",
        ),
        (
            json!({"role": "user", "content": [part]}),
            "content[0].cache_control",
        ),
        (call(json!({"index": 0}), json!({})), "tool_calls[0].index"),
        (
            call(json!({}), json!({"parsed": {}})),
            "tool_calls[0].function.parsed",
        ),
    ] {
        let messages = json!([message]);
        with(json!({"messages": messages})).unwrap();
        let (_, at) = refusal(asked("messages", messages));
        assert_eq!(at, format!("messages[0].{param}"));
    }
    let plain = json!([call(json!({}), json!({})), {"role": "user", "content": "hi"}]);
    asked("messages", plain).unwrap();
}

#[test]
fn prompts_of_a_completion_are_texts_or_lists_of_tokens() {
    let read = |prompt: Value| {
        let body = json!({"model": "m", "prompt": prompt}).to_string();
        completion(body.as_bytes(), RULES).map(|request| {
            let all = [request.chat.prompt]
                .into_iter()
                .chain(request.more_prompts);
            let all = all.map(|prompt| match prompt {
                Prompt::Text(text) => text,
                Prompt::Tokens(ids) => format!("{ids:?}"),
                Prompt::Messages(_) => unreachable!(),
            });
            all.collect::<Vec<_>>()
        })
    };
    assert_eq!(read(json!("p")).unwrap(), ["p"]);
    assert_eq!(read(json!(["p", "q"])).unwrap(), ["p", "q"]);
    assert_eq!(read(json!([1, 2])).unwrap(), ["[1, 2]"]);
    assert_eq!(read(json!([7])).unwrap(), ["[7]"]);
    assert_eq!(read(json!([[1, 2], [3]])).unwrap(), ["[1, 2]", "[3]"]);
    assert_eq!(
        read(json!(vec!["p"; MAX_PROMPTS])).unwrap().len(),
        MAX_PROMPTS
    );
    let wrong = json!([[], [[]], [[1], []], [-1], [1e12], 5, ["a", 1], ["a", [1]]]);
    for wrong in wrong.as_array().unwrap() {
        assert!(read(wrong.clone()).is_err(), "{wrong}");
    }
    assert!(read(json!(vec!["p"; MAX_PROMPTS + 1])).is_err());
}

#[test]
fn an_echo_with_log_probabilities_scores_the_prompt() {
    let read = |more: &str| {
        let body = format!(r#"{{"model": "m", "prompt": "p" {more}}}"#);
        let request = completion(body.as_bytes(), RULES).unwrap();
        (request.echo, request.chat.options.prompt_logprobs)
    };
    assert_eq!(read(""), (false, false));
    assert_eq!(read(r#", "logprobs": 1"#), (false, false));
    assert_eq!(read(r#", "echo": true"#), (true, false));
    assert_eq!(read(r#", "echo": true, "logprobs": 0"#), (true, true));
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(body in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = chat(&body, RULES);
        let _ = completion(&body, RULES);
    }

    #[test]
    fn no_value_of_any_field_makes_it_panic(
        name in prop::sample::select(&[
            "messages", "model", "stop", "seed", "n", "logprobs", "top_logprobs", "stream",
            "stream_options", "temperature", "max_tokens", "user", "tools", "response_format",
            "tool_choice", "reasoning", "reasoning_effort", "chat_template_kwargs",
            "structured_outputs", "json_schema", "grammar", "logit_bias", "truncation", "prompt",
            "echo", "best_of",
        ][..]),
        value in prop::sample::select(vec![
            json!(null), json!(true), json!(-1), json!(1e300), json!(u64::MAX), json!(""),
            json!([]), json!({}), json!([[]]), json!([{}]), json!({"type": {}}), json!("\u{0}"),
        ]),
    ) {
        let mut body = base();
        body[name] = value;
        let _ = chat(body.to_string().as_bytes(), RULES);
        let _ = completion(body.to_string().as_bytes(), RULES);
    }
}
