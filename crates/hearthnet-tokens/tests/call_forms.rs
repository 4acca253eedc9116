//! Calls whose arguments are not JSON: between marks, or in a notation of the family.
#![allow(clippy::unwrap_used, clippy::panic)]

use hearthnet_testkit::rows;
use hearthnet_tokens::Tokenizer;
use hearthnet_tokens::grammar::{Constraint, GrammarError};
use hearthnet_tokens::template::{Chat, ChatMessage, Role};
use hearthnet_tokens::tokenizer::Special;
use hearthnet_tokens::tools::{
    Thought, Tool, ToolCall, ToolChoice, Tools, TurnFormat, TurnReader, call_id, turn_grammar,
};
use serde_json::{Value, json};

use crate::turns::{read, source, template};
use crate::vocabularies::vocabulary;

/// Template, vocabulary, beginning and end of calls, and whether the template writes lists as JSON.
const FORMS: &[(&str, &str, &str, &str, bool)] = &rows! {
    "google-gemma-4-31B-it", "gemma-4", "<|tool_call>", "<tool_call|>" => true;
    "ByteDance-Seed-OSS", "llama-bpe", "<seed:tool_call>", "</seed:tool_call>" => false;
    "Qwen3-Coder", "qwen2", "<tool_call>", "</tool_call>" => true;
    "Qwen3.5-4B", "qwen35", "<tool_call>", "</tool_call>" => true;
    "StepFun3.5-Flash", "qwen2", "<tool_call>", "</tool_call>" => true;
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "llama-bpe", "<tool_call>", "</tool_call>" => true;
    "GLM-4.6", "llama-bpe", "<tool_call>", "</tool_call>" => true;
    "GLM-4.7-Flash", "llama-bpe", "<tool_call>", "</tool_call>" => true;
    "MiniMax-M2", "llama-bpe", "<minimax:tool_call>", "</minimax:tool_call>" => true;
    "LFM2.5-8B-A1B", "llama-bpe", "<|tool_call_start|>", "<|tool_call_end|>" => false;
};

const QWEN: &str = "Qwen3.5-4B";
const GLM: &str = "GLM-4.7-Flash";
const GEMMA: &str = "google-gemma-4-31B-it";
const LFM: &str = "LFM2.5-8B-A1B";

fn tools_of(parameters: Value, strict: bool) -> Tools {
    let tool = |name: &str| Tool {
        name: name.into(),
        description: Some("Weather.".into()),
        parameters: parameters.as_object().cloned(),
        strict,
    };
    Tools {
        list: vec![tool("get"), tool("get_weather")],
        ..Tools::default()
    }
}

fn weather() -> Tools {
    let parameters = json!({
        "type": "object",
        "properties": {
            "town": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["town"],
    });
    tools_of(parameters, true)
}

/// Whether the grammar of a turn with these tools accepts a turn.
fn accepts(format: TurnFormat, tokenizer: &Tokenizer, tools: &Tools, text: &str) -> bool {
    let grammar = turn_grammar(&format, Thought::None, tools, None).unwrap();
    let vocabulary = tokenizer.grammar_vocabulary().unwrap();
    let mut turn = Constraint::new(vocabulary, &grammar, true).unwrap();
    let ids = tokenizer.encode(text, Special::Parse).unwrap();
    let follows = ids.iter().all(|id| {
        let allowed = turn.allowed().is_ok_and(|allowed| allowed.allows(*id));
        allowed && turn.accept(*id).is_ok()
    });
    let end = (0..u32::try_from(tokenizer.vocab_size()).unwrap())
        .find(|id| tokenizer.is_end_of_generation(*id));
    follows
        && turn
            .allowed()
            .is_ok_and(|allowed| allowed.is_none() || allowed.allows(end.unwrap()))
}

fn arguments(template: &str, tools: &Tools, text: &str) -> Vec<String> {
    let format = TurnFormat::of(&source(template));
    let (said, _, calls) = read(format, Thought::None, tools, text, 1);
    assert_eq!(said, "", "{template}");
    let whole = read(format, Thought::None, tools, text, usize::MAX);
    assert_eq!(whole.2, calls, "{template}");
    calls.into_iter().map(|call| call.arguments).collect()
}

#[test]
fn a_call_that_a_template_writes_is_read_and_accepted_as_it_was() {
    for (name, vocabulary_name, begin, end, lists) in FORMS {
        let (tokenizer, template) = (vocabulary(vocabulary_name), template(name));
        let tools = weather();
        let mut first = json!({"town": "Oslo <b>\n {é}, ok:\"", "days": 3, "tags": ["a, b", "c"]});
        if !lists {
            first.as_object_mut().unwrap().remove("tags");
        }
        let second = json!({"town": ""});
        let call = |index, name: &str, arguments: &Value| ToolCall {
            id: call_id(1, index),
            name: name.into(),
            arguments: arguments.to_string(),
        };
        let mut calls = ChatMessage::assistant("");
        calls.tool_calls = vec![call(0, "get_weather", &first), call(1, "get", &second)];
        let mut result = ChatMessage::new(Role::Tool, "RESULT");
        result.tool_call_id = Some(call_id(1, 0));
        let messages = [ChatMessage::user("QUESTION"), calls, result];
        let chat = Chat {
            messages: &messages,
            tools: &tools.list,
            variables: &[],
        };
        let prompt = template.prompt(&tokenizer, &chat, true).unwrap();
        let prompt = tokenizer.decode_with_special(&prompt.ids);
        let (_, behind) = prompt.split_once("QUESTION").unwrap();
        let (turn, _) = behind.split_once("RESULT").unwrap();
        let from = turn.find(begin).unwrap_or_else(|| panic!("{name}: {turn}"));
        let to = turn.rfind(end).unwrap() + end.len();
        let turn = &turn[from..to];
        let format = template.turn_format();
        let (said, _, calls) = read(format, Thought::None, &tools, turn, 1);
        assert_eq!(said, "", "{name}");
        let called: Vec<(&str, Value)> = calls
            .iter()
            .map(|call| (&*call.name, serde_json::from_str(&call.arguments).unwrap()))
            .collect();
        assert_eq!(
            called,
            [("get_weather", first), ("get", second)],
            "{name}: {turn}"
        );
        assert!(accepts(format, &tokenizer, &tools, turn), "{name}: {turn}");
    }
}

#[test]
fn a_call_that_is_cut_has_the_beginning_of_its_arguments() {
    let text = "Oslo \"}";
    for (name, turn) in [
        (
            QWEN,
            format!(
                "<tool_call>\n<function=get>\n<parameter=town>\n{text}\n</parameter>\n<parameter=days>\n12\n</parameter>\n</function>\n</tool_call>"
            ),
        ),
        (
            GLM,
            format!(
                "<tool_call>get<arg_key>town</arg_key><arg_value>{text}</arg_value><arg_key>days</arg_key><arg_value>12</arg_value></tool_call>"
            ),
        ),
        (
            GEMMA,
            format!("<|tool_call>call:get{{town:<|\"|>{text}<|\"|>,days:12}}<tool_call|>"),
        ),
        (
            LFM,
            format!("<|tool_call_start|>[get(town='{text}', days=12)]<|tool_call_end|>"),
        ),
    ] {
        let (tools, format) = (weather(), TurnFormat::of(&source(name)));
        let whole = "{\"town\": \"Oslo \\\"}\", \"days\": 12}";
        assert_eq!(arguments(name, &tools, &turn), [whole], "{name}");
        for (cut, _) in turn.char_indices() {
            let (said, _, calls) = read(format, Thought::None, &tools, &turn[..cut], 1);
            let arguments = calls.first().map_or("", |call| &call.arguments);
            assert!(whole.starts_with(arguments), "{name}: {arguments}");
            assert!(said.len() <= turn.find('>').unwrap(), "{name}: {said}");
        }
    }
}

#[test]
fn a_text_streams_while_it_is_written() {
    for (name, turn) in rows! {
        QWEN => "<tool_call>\n<function=get>\n<parameter=town>\nNew \"Y\n";
        GLM => "<tool_call>get<arg_key>town</arg_key><arg_value>New \"Y\n";
        GEMMA => "<|tool_call>call:get{town:<|\"|>New \"Y\n";
        LFM => "<|tool_call_start|>[get(town='New \"Y\n";
    } {
        let format = TurnFormat::of(&source(name));
        let mut reader = TurnReader::new(format, Thought::None, &weather(), 1);
        let first = reader.push(turn);
        let said = first.calls[0].arguments.clone();
        // The line feed may belong to the mark behind the text.
        assert!(said.starts_with("{\"town\": \"New \\\"Y"), "{name}: {said}");
        let more = reader.push("ork");
        let said = said + &more.calls[0].arguments;
        assert_eq!(said, "{\"town\": \"New \\\"Y\\nork", "{name}");
    }
}

#[test]
fn a_repeated_argument_is_left_out() {
    for (name, turn) in [
        (
            QWEN,
            "<tool_call><function=get><parameter=town>\nA\n</parameter><parameter=town>\nB\n</parameter></function></tool_call>",
        ),
        (
            GLM,
            "<tool_call>get<arg_key>town</arg_key><arg_value>A</arg_value><arg_key>town</arg_key><arg_value>B</arg_value></tool_call>",
        ),
        (
            GEMMA,
            "<|tool_call>call:get{town:<|\"|>A<|\"|>,town:{b:[<|\"|>B<|\"|>]}}<tool_call|>",
        ),
        (
            LFM,
            "<|tool_call_start|>[get(town='A', town=\"B\")]<|tool_call_end|>",
        ),
    ] {
        assert_eq!(
            arguments(name, &weather(), turn),
            ["{\"town\": \"A\"}"],
            "{name}"
        );
        let tokenizer = vocabulary("llama-bpe");
        let format = TurnFormat::of(&source(name));
        assert!(!accepts(format, &tokenizer, &weather(), turn), "{name}");
    }
}

#[test]
fn an_argument_that_the_schema_does_not_name_is_allowed_only_where_it_may_be() {
    let tokenizer = vocabulary("llama-bpe");
    let closed = weather();
    let open = tools_of(
        json!({"type": "object", "additionalProperties": true}),
        false,
    );
    for (name, turn) in [
        (
            QWEN,
            "<tool_call>\n<function=get>\n<parameter=zip>\n12\n</parameter>\n<parameter=name>\n12 a\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            GLM,
            "<tool_call>get<arg_key>zip</arg_key><arg_value>12</arg_value><arg_key>name</arg_key><arg_value>12 a</arg_value></tool_call>",
        ),
        (
            GEMMA,
            "<|tool_call>call:get{zip:12,name:<|\"|>12 a<|\"|>}<tool_call|>",
        ),
        (
            LFM,
            "<|tool_call_start|>[get(zip=12, name='12 a')]<|tool_call_end|>",
        ),
    ] {
        let format = TurnFormat::of(&source(name));
        assert_eq!(
            arguments(name, &open, turn),
            ["{\"zip\": 12, \"name\": \"12 a\"}"],
            "{name}"
        );
        assert!(accepts(format, &tokenizer, &open, turn), "{name}");
        assert!(!accepts(format, &tokenizer, &closed, turn), "{name}");
    }
}

#[test]
fn a_mark_within_a_text_of_json_ends_nothing() {
    let tags = "[\"\\n</parameter>\", \"</arg_value>\", \")]\"]";
    let read = format!("{{\"town\": \"A\", \"tags\": {tags}}}");
    for (name, turn) in [
        (
            QWEN,
            format!(
                "<tool_call><function=get><parameter=town>\nA\n</parameter><parameter=tags>\n{tags}\n</parameter></function></tool_call>"
            ),
        ),
        (
            GLM,
            format!(
                "<tool_call>get<arg_key>town</arg_key><arg_value>A</arg_value><arg_key>tags</arg_key><arg_value>{tags}</arg_value></tool_call>"
            ),
        ),
        (
            LFM,
            format!("<|tool_call_start|>[get(town='A', tags={tags})]<|tool_call_end|>"),
        ),
    ] {
        assert_eq!(arguments(name, &weather(), &turn), [&*read], "{name}");
    }
    let turn = "<|tool_call>call:get{town:<|\"|>a}<tool_call|>,\"<|\"|>}<tool_call|>";
    let read = "{\"town\": \"a}<tool_call|>,\\\"\"}";
    assert_eq!(arguments(GEMMA, &weather(), turn), [read]);
}

#[test]
fn a_value_has_the_type_that_its_schema_says() {
    let tokenizer = vocabulary("qwen35");
    for (schema, value, json) in rows! {
        json!({"type": "string"}), "12" => Some("\"12\"");
        json!({"type": "string"}), "null" => Some("\"null\"");
        json!({"type": "string"}), "a\n\nb " => Some("\"a\\n\\nb \"");
        json!({"type": ["string", "null"]}), "null" => Some("null");
        json!({"anyOf": [{"type": "string"}, {"type": "null"}]}), "nul" => Some("\"nul\"");
        json!({"type": "string", "enum": ["a", "b"]}), "b" => Some("\"b\"");
        json!({"type": "string", "enum": ["a", "b"]}), "c" => None;
        json!({"type": "string", "minLength": 2}), "é" => None;
        json!({"type": "string", "pattern": "^a+$"}), "\"aa\"" => Some("\"aa\"");
        json!({"type": "string", "pattern": "^a+$"}), "\"ab\"" => None;
        json!({"type": "integer", "minimum": 3}), "3" => Some("3");
        json!({"type": "integer", "minimum": 3}), "2" => None;
        json!({"type": "boolean"}), "true" => Some("true");
        json!({"type": "boolean"}), "yes" => None;
        json!({"type": "array", "maxItems": 1}), "[{\"a\": \"}\"}]" => Some("[{\"a\": \"}\"}]");
        json!({"type": "array", "maxItems": 1}), "[1, 2]" => None;
        json!({}), "{\"a\": 1}" => Some("{\"a\": 1}");
        json!({}), "{\"a\": 1" => Some("\"{\\\"a\\\": 1\"");
        json!({"type": ["string", "integer"]}), "1.5" => Some("\"1.5\"");
        json!({"type": ["string", "integer"]}), "15" => Some("15");
        json!({"$ref": "#/$defs/n"}), "7" => Some("7");
        json!({"$ref": "#/$defs/n"}), "x" => None;
        json!({"type": "array", "items": {"$ref": "#/$defs/n"}}), "[7]" => Some("[7]");
    } {
        let tools = tools_of(
            json!({"type": "object", "properties": {"v": schema}, "$defs": {"n": {"type": "integer"}}}),
            false,
        );
        let turn = format!(
            "<tool_call>\n<function=get>\n<parameter=v>\n{value}\n</parameter>\n</function>\n</tool_call>"
        );
        let format = TurnFormat::of(&source(QWEN));
        let accepted = accepts(format, &tokenizer, &tools, &turn);
        assert_eq!(accepted, json.is_some(), "{schema} {value}");
        if let Some(json) = json {
            let read = arguments(QWEN, &tools, &turn);
            assert_eq!(read, [format!("{{\"v\": {json}}}")], "{schema} {value}");
        }
    }
}

#[test]
fn the_notation_of_gemma_follows_the_schema() {
    let tokenizer = vocabulary("gemma-4");
    let schema = json!({
        "type": "object",
        "properties": {
            "z": {"type": "string", "enum": ["a", "b"]},
            "list": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
            "Who": {"type": "object", "properties": {"a:b": {"type": "string", "maxLength": 2}}},
            "any": {},
            "tree": {"$ref": "#/$defs/tree"},
        },
        "$defs": {"tree": {
            "type": "object",
            "properties": {"on": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
        }},
    });
    let tools = tools_of(schema, true);
    let format = TurnFormat::of(&source(GEMMA));
    for (turn, json) in [
        ("{}", Some("{}")),
        (
            "{list:[1,-2.5],z:<|\"|>b<|\"|>}",
            Some("{\"list\": [1, -2.5], \"z\": \"b\"}"),
        ),
        (
            "{any:{a:[null,true,<|\"|>x<|\"|>],b:{}},Who:{a:b:<|\"|>c:<|\"|>}}",
            Some("{\"any\": {\"a\": [null, true, \"x\"], \"b\": {}}, \"Who\": {\"a:b\": \"c:\"}}"),
        ),
        ("{any:{a:[null,true,<|\"|>x<|\"|>],b:{}},who:1}", None),
        (
            "{any:{a:[null,true,<|\"|>x\n<|\"|>],b:{}}}",
            Some("{\"any\": {\"a\": [null, true, \"x\\n\"], \"b\": {}}}"),
        ),
        (
            "{Who:{a:b:<|\"|>c:<|\"|>}}",
            Some("{\"Who\": {\"a:b\": \"c:\"}}"),
        ),
        (
            "{tree:{on:[{},{on:[]}]}}",
            Some("{\"tree\": {\"on\": [{}, {\"on\": []}]}}"),
        ),
        ("{tree:{on:[1]}}", None),
        ("{z:<|\"|>c<|\"|>}", None),
        ("{list:[]}", None),
        ("{list:[1,2,3]}", None),
        ("{Who:{a:b:<|\"|>abc<|\"|>}}", None),
    ] {
        let turn = format!("<|tool_call>call:get{turn}<tool_call|>");
        assert_eq!(
            accepts(format, &tokenizer, &tools, &turn),
            json.is_some(),
            "{turn}"
        );
        if let Some(json) = json {
            assert_eq!(arguments(GEMMA, &tools, &turn), [json]);
        }
    }
}

#[test]
fn keywords_that_a_form_does_not_enforce_are_refused_if_strict() {
    let tokenizer = vocabulary("qwen2");
    for (name, schema) in rows! {
        GEMMA => json!({"properties": {"a": {"type": "string", "pattern": "a"}}});
        GEMMA => json!({"properties": {"a": {"type": "array", "uniqueItems": true}}});
        QWEN => json!({"properties": {"a": {"type": "array", "uniqueItems": true}}});
        QWEN => json!({"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]});
        LFM => json!({"patternProperties": {"^x": {}}});
    } {
        for strict in [true, false] {
            let tools = tools_of(schema.clone(), strict);
            let format = TurnFormat::of(&source(name));
            let grammar = turn_grammar(&format, Thought::None, &tools, None).unwrap();
            let vocabulary = tokenizer.grammar_vocabulary().unwrap();
            let error = Constraint::new(vocabulary, &grammar, true).err();
            let refused = matches!(error, Some(GrammarError::Unsupported(_)));
            assert_eq!(refused, strict, "{name} {schema} {error:?}");
            assert_eq!(error.is_some(), strict, "{name} {schema} {error:?}");
        }
    }
}

#[test]
fn a_turn_that_must_call_begins_with_the_call() {
    let tokenizer = vocabulary("gemma-4");
    let format = TurnFormat::of(&source(GEMMA));
    let mut tools = weather();
    tools.choice = ToolChoice::Named("get_weather".into());
    let call = |name: &str| format!("<|tool_call>call:{name}{{town:<|\"|>A<|\"|>}}<tool_call|>");
    assert!(accepts(format, &tokenizer, &tools, &call("get_weather")));
    assert!(!accepts(format, &tokenizer, &tools, &call("get")));
    assert!(!accepts(format, &tokenizer, &tools, "Yes."));
    tools.choice = ToolChoice::Auto;
    assert!(accepts(
        format,
        &tokenizer,
        &tools,
        &format!("Yes.{}{}", call("get"), call("get"))
    ));
    assert!(!accepts(
        format,
        &tokenizer,
        &tools,
        "Yes.<|channel>thought\n<channel|>"
    ));
}
