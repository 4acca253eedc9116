//! Turns with tools and reasoning over llama.cpp's templates and vocabularies: prompts, random
//! turns of each family within their grammar, and what the reader makes of them.
#![allow(clippy::unwrap_used, clippy::panic)]

use hearthnet_files::sampling::SamplerConfig;
use hearthnet_testkit::rows;
use hearthnet_tokens::grammar::Constraint;
use hearthnet_tokens::template::{Chat, ChatMessage, ChatTemplate, Role, TemplateTime};
use hearthnet_tokens::tokenizer::{Special, Tokenizer};
use hearthnet_tokens::tools::{
    Thought, Tool, ToolCall, ToolChoice, Tools, TurnFormat, TurnReader, call_id, turn_grammar,
};
use hearthnet_tokens::{Detokenizer, Grammar, Sampler};
use serde_json::{Value, json};
use std::fs;
use std::thread;

use crate::vocabularies::vocabulary;

/// Template, vocabulary, whether the template describes tools, and the text that begins a call.
const FAMILIES: &[(&str, &str, bool, &str)] = &rows! {
    "Qwen-Qwen2.5-7B-Instruct", "qwen2", true => "<tool_call>";
    "Qwen-Qwen3-0.6B", "qwen2", true => "<tool_call>";
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "llama-bpe", true => "<tool_call>";
    "ibm-granite-granite-4.0", "gpt-2", true => "<tool_call>";
    "ibm-granite-granite-3.3-2B-Instruct", "starcoder", true => "<|tool_call|>";
    "meta-llama-Llama-3.1-8B-Instruct", "llama-bpe", true => "{\"name\": \"";
    "meta-llama-Llama-3.2-3B-Instruct", "llama-bpe", true => "{\"name\": \"";
    "mistralai-Mistral-Nemo-Instruct-2407", "llama-spm", true => "[TOOL_CALLS]";
    "unsloth-mistral-Devstral-Small-2507", "llama-spm", true => "[TOOL_CALLS]";
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "command-r", true => "<|START_ACTION|>";
    "deepseek-ai-DeepSeek-V3.1", "deepseek-llm", false => "<tool_call>";
    "openai-gpt-oss-120b", "gpt-2", true => "<|channel|>commentary to=functions.";
    "google-gemma-2-2b-it", "llama-spm", false => "<tool_call>";
    "microsoft-Phi-3.5-mini-instruct", "phi-3", false => "<tool_call>";
    "google-gemma-4-31B-it", "gemma-4", true => "<|tool_call>";
    "google-gemma-4-31B-it-interleaved", "gemma-4", true => "<|tool_call>";
    "ByteDance-Seed-OSS", "llama-bpe", true => "<seed:tool_call>";
    "Qwen3-Coder", "qwen2", true => "<tool_call>";
    "Qwen3.5-4B", "qwen35", true => "<tool_call>";
    "StepFun3.5-Flash", "qwen2", true => "<tool_call>";
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "llama-bpe", true => "<tool_call>";
    "GLM-4.6", "llama-bpe", true => "<tool_call>";
    "GLM-4.7-Flash", "llama-bpe", true => "<tool_call>";
    "poolside-Laguna-S-2.1", "llama-bpe", true => "<tool_call>";
    "inclusionai-ling-3.0-flash", "llama-bpe", true => "<tool_call>";
    "Spark2.5", "llama-bpe", true => "<tool_call>";
    "MiniMax-M2", "llama-bpe", true => "<minimax:tool_call>";
    "LFM2-8B-A1B", "llama-bpe", true => "<|tool_call_start|>";
    "LFM2.5-Instruct", "llama-bpe", true => "<|tool_call_start|>";
    "LFM2.5-8B-A1B", "llama-bpe", true => "<|tool_call_start|>";
    "NVIDIA-Nemotron-Nano-v2", "llama-bpe", true => "<TOOLCALL>";
    "Apertus-8B-Instruct", "llama-bpe", true => "<|tools_prefix|>";
    "unsloth-Apriel-1.5", "llama-bpe", true => "<tool_calls>";
};

/// Conversations of each family: a few, or as many as the environment says.
fn conversations() -> u64 {
    let asked = std::env::var("HEARTHNET_TEST_TURNS");
    asked.map_or(12, |asked| asked.parse().unwrap())
}

pub(crate) fn source(name: &str) -> String {
    let file = hearthnet_testkit::chat_templates().join(format!("{name}.jinja"));
    fs::read_to_string(file).unwrap()
}

pub(crate) fn template(name: &str) -> ChatTemplate {
    let template = ChatTemplate::new(&source(name), "<s>", "</s>").unwrap();
    template.with_clock(|| TemplateTime::from_unix(1_753_000_000))
}

fn tool(name: &str, strict: bool) -> Tool {
    let parameters = json!({
        "type": "object",
        "properties": {
            "town": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["town"],
        "additionalProperties": false,
    });
    Tool {
        name: name.into(),
        description: Some("The weather of a town.".into()),
        parameters: parameters.as_object().cloned(),
        strict,
    }
}

fn tools(choice: ToolChoice) -> Tools {
    Tools {
        list: vec![tool("get_weather", true), tool("get", false)],
        choice,
        one_call: false,
    }
}

/// A conversation in which a tool was called and answered.
fn conversation(n: u64) -> Vec<ChatMessage> {
    let id = call_id(n, 0);
    let mut call = ChatMessage::assistant("");
    call.tool_calls = vec![ToolCall {
        id: id.clone(),
        name: "get_weather".into(),
        arguments: format!("{{\"town\": \"Oslo {n}\"}}"),
    }];
    let mut result = ChatMessage::new(Role::Tool, format!("{{\"celsius\": {n}}}"));
    result.tool_call_id = Some(id);
    vec![
        ChatMessage::user("Is it warm in Oslo?"),
        call,
        result,
        ChatMessage::assistant("No."),
        ChatMessage::user("And in Rome?"),
    ]
}

/// Logits of a model that says anything, and rather ends its turn than calls on and on. A mark ends the
/// text of an argument, so a model that hardly began one would not end some of them.
fn logits(tokenizer: &Tokenizer) -> Vec<f32> {
    let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap();
    let liked = ids.map(|id| match tokenizer.is_end_of_generation(id) {
        true => 4.0,
        false if tokenizer.decode(&[id]).starts_with('<') => 3.0,
        false => 0.0,
    });
    liked.collect()
}

/// Token of such a model; `None` at the end of its turn.
fn sampled(
    sampler: &mut Sampler,
    (tokenizer, logits): (&Tokenizer, &[f32]),
    grammar: &mut Constraint,
) -> Option<u32> {
    let allowed = grammar.allowed().unwrap();
    if allowed.is_none() {
        return None;
    }
    let id = sampler.sample_allowed(logits, Some(&allowed)).unwrap().id;
    (!tokenizer.is_end_of_generation(id)).then_some(id)
}

/// A random turn within its grammar. `begins` is said after `before` tokens, if it may be.
fn random_turn(
    (tokenizer, logits): (&Tokenizer, &[f32]),
    format: TurnFormat,
    thought: Thought,
    tools: &Tools,
    begins: Option<(usize, &str)>,
    seed: u64,
) -> String {
    let grammar = turn_grammar(&format, thought, tools, None).unwrap();
    let vocabulary = tokenizer.grammar_vocabulary().unwrap();
    let mut grammar = Constraint::new(vocabulary, &grammar, true).unwrap();
    let mut sampler = Sampler::new(SamplerConfig {
        temperature: 1.0,
        seed: Some(seed),
        ..SamplerConfig::default()
    })
    .unwrap();
    let marks = format.marks(!tools.callable().is_empty());
    let mut detokenizer = Detokenizer::new(tokenizer).showing(&marks);
    let (mut text, mut count) = (String::new(), 0);
    let mut say = |id: u32, grammar: &mut Constraint| {
        let accepted = grammar.accept(id);
        assert!(
            accepted.is_ok(),
            "{thought:?} {text:?} {:?}",
            tokenizer.decode_with_special(&[id])
        );
        text += &detokenizer.push(id);
    };
    if thought == Thought::Begun {
        for id in tokenizer.encode("hm</think>\n\n", Special::Parse).unwrap() {
            say(id, &mut grammar);
        }
    }
    let mut begins = begins;
    let (must, calls) = (tools.must_call(), begins.is_some());
    loop {
        // In the middle of a character nothing else may follow.
        if let Some((before, mark)) = begins
            && before <= count
        {
            let mark = tokenizer.encode(mark, Special::Parse).unwrap();
            if grammar.allowed().unwrap().allows(mark[0]) {
                mark.iter().for_each(|id| say(*id, &mut grammar));
                begins = None;
            }
        }
        let Some(id) = sampled(&mut sampler, (tokenizer, logits), &mut grammar) else {
            break;
        };
        say(id, &mut grammar);
        count += 1;
        assert!(count < 5000, "it does not end");
        if !must && !calls && count > 20 {
            break;
        }
    }
    text + &detokenizer.finish()
}

/// Text, reasoning and calls that a reader finds in a text that arrives `cut` characters at a time.
pub(crate) fn read(
    format: TurnFormat,
    thought: Thought,
    tools: &Tools,
    text: &str,
    cut: usize,
) -> (String, String, Vec<ToolCall>) {
    let mut reader = TurnReader::new(format, thought, tools, 7);
    let (mut said, mut thoughts, mut calls) = (String::new(), String::new(), Vec::new());
    let chars: Vec<char> = text.chars().collect();
    for piece in chars.chunks(cut) {
        let piece: String = piece.iter().collect();
        let part = reader.push(&piece);
        said += &part.text;
        thoughts += &part.reasoning;
        part.calls.iter().for_each(|call| call.add_to(&mut calls));
    }
    let rest = reader.finish();
    said += &rest.text;
    thoughts += &rest.reasoning;
    assert_eq!(reader.calls(), calls);
    assert_eq!(reader.reasoning(), thoughts);
    (said, thoughts, calls)
}

/// Random turns of a family.
fn check_turns((name, vocabulary_name, native, begins): &(&str, &str, bool, &str)) {
    let (tokenizer, template) = (vocabulary(vocabulary_name), template(name));
    let logits = logits(&tokenizer);
    let format = template.turn_format();
    let mut called = 0;
    for n in 0..conversations() {
        let tools = tools(match n % 4 {
            0 => ToolChoice::Required,
            1 => ToolChoice::Named("get".into()),
            _ => ToolChoice::Auto,
        });
        let messages = conversation(n);
        let chat = Chat {
            messages: &messages,
            tools: &tools.list,
            variables: &[],
        };
        let prompt = template.prompt(&tokenizer, &chat, true);
        let prompt = prompt.unwrap_or_else(|error| panic!("{name}: {error}"));
        let written = tokenizer.decode_with_special(&prompt.ids);
        assert!(written.contains("get_weather"), "{name}: {written}");
        assert!(written.contains(&format!("Oslo {n}")), "{name}: {written}");
        assert_eq!(written.contains("You may call these"), !native, "{name}");
        // A random text would not end its reasoning.
        let must = tools.must_call();
        let thought = match (prompt.thinking, format.thinks()) {
            (true, _) => Thought::Begun,
            (false, true) if !must => Thought::May,
            (false, true) => Thought::None,
            (false, false) => Thought::None,
        };
        // The calls of Llama and gpt-oss are the whole answer.
        let whole = begins.starts_with('{') || begins.starts_with("<|channel");
        let before = if whole { 0 } else { 3 };
        let begins = (!must && n % 8 != 7).then_some((before, *begins));
        let text = random_turn((&tokenizer, &logits), format, thought, &tools, begins, n);
        let (said, _, calls) = read(format, thought, &tools, &text, usize::MAX);
        for cut in [1, 3] {
            let again = read(format, thought, &tools, &text, cut);
            assert_eq!((&again.0, &again.2), (&said, &calls), "{name}");
        }
        if must {
            assert!(said.is_empty(), "{name}: {said:?}");
            assert!(!calls.is_empty(), "{name}: {text:?}");
        }
        let marks = format.marks(true);
        assert!(
            !marks.iter().any(|mark| said.contains(mark)),
            "{name}: {said:?}"
        );
        for call in &calls {
            let allowed = tools.callable().iter().any(|tool| tool.name == call.name);
            assert!(allowed, "{name}: {}", call.name);
            let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
            assert!(arguments["town"].as_str().unwrap().chars().count() <= 6);
            let days = arguments.get("days");
            assert!(days.is_none_or(|days| (1..10).contains(&days.as_i64().unwrap())));
        }
        called += calls.len();
    }
    assert!(called as u64 >= conversations() / 2, "{name}: {called}");
}

#[test]
fn no_random_turn_of_any_family_has_a_malformed_call_or_a_mark_in_its_text() {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for part in FAMILIES.chunks(FAMILIES.len().div_ceil(threads)) {
            scope.spawn(|| part.iter().for_each(check_turns));
        }
    });
}

#[test]
fn each_family_writes_calls_in_its_own_way() {
    let (name, town) = ("get_weather", "{\"town\": \"Oslo\"}");
    for (template, text) in [
        (
            "Qwen-Qwen3-0.6B",
            format!(
                "hi <tool_call>\n{{\"name\": \"{name}\", \"arguments\": {town}}}\n</tool_call>\n<tool_call>\n{{\"name\": \"get\", \"arguments\": {town}}}\n</tool_call>"
            ),
        ),
        (
            "meta-llama-Llama-3.1-8B-Instruct",
            format!("<|python_tag|>{{\"name\": \"{name}\", \"parameters\": {town}}}"),
        ),
        (
            "mistralai-Mistral-Nemo-Instruct-2407",
            format!(
                "[TOOL_CALLS] [{{\"name\": \"{name}\", \"arguments\": {town}}}, {{\"name\": \"get\", \"arguments\": {town}}}]"
            ),
        ),
        (
            "unsloth-mistral-Devstral-Small-2507",
            format!("[TOOL_CALLS]{name}[ARGS]{town}"),
        ),
        (
            "ibm-granite-granite-3.3-2B-Instruct",
            format!("<|tool_call|>[{{\"name\": \"{name}\", \"arguments\": {town}}}]"),
        ),
        (
            "openai-gpt-oss-120b",
            format!(
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{town}"
            ),
        ),
        (
            "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
            format!(
                "<|START_ACTION|>[\n    {{\"tool_call_id\": \"0\", \"tool_name\": \"{name}\", \"parameters\": {town}}}\n]<|END_ACTION|>"
            ),
        ),
    ] {
        let format = TurnFormat::of(&source(template));
        let tools = tools(ToolChoice::Auto);
        let (said, _, calls) = read(format, Thought::May, &tools, &text, 1);
        assert!(said.is_empty() || said == "hi", "{template}: {said:?}");
        assert_eq!(calls[0].name, name, "{template}");
        assert!(
            calls.iter().all(|call| call.arguments == town),
            "{template}"
        );
        assert_eq!(calls.len(), text.matches("Oslo").count(), "{template}");
    }
}

#[test]
fn reasoning_between_other_marks_is_separated_as_well() {
    for (name, begin, end) in [
        ("google-gemma-4-31B-it", "<|channel>thought\n", "<channel|>"),
        ("ByteDance-Seed-OSS", "<seed:think>", "</seed:think>"),
        ("MiniMax-M3", "<mm:think>", "</mm:think>"),
    ] {
        let format = TurnFormat::of(&source(name));
        for (thought, text) in [
            (Thought::May, format!("\n{begin}a b\n{end}\n\nYes.")),
            (Thought::Begun, format!("a b{end}Yes.")),
        ] {
            for cut in [1, 3, 100] {
                let read = read(format, thought, &Tools::default(), &text, cut);
                assert_eq!((&*read.0, &*read.1), ("Yes.", "a b"), "{name}");
            }
        }
    }
}

#[test]
fn reasoning_is_separated_from_the_answer() {
    let format = TurnFormat::of(&source("Qwen-Qwen3-0.6B"));
    let tools = Tools::default();
    for (thought, text, thoughts, said) in rows! {
        Thought::May, "<think>\na b\n</think>\n\nYes.\n", "a b" => "Yes.\n";
        Thought::Begun, "a <tool_call> b</think>Yes.", "a <tool_call> b" => "Yes.";
        Thought::May, "Yes, <think>", "" => "Yes, <think>";
        Thought::May, " \n<thin", "" => " \n<thin";
        Thought::Begun, "cut </thi", "cut </thi" => "";
        Thought::None, "<think>a</think>", "" => "<think>a</think>";
    } {
        for cut in [1, 2, 5, 100] {
            let read = read(format, thought, &tools, text, cut);
            assert_eq!(
                (read.0.as_str(), read.1.as_str()),
                (said, thoughts),
                "{text:?}"
            );
        }
    }
}

#[test]
fn the_channels_of_gpt_oss_are_separated() {
    let format = TurnFormat::of(&source("openai-gpt-oss-120b"));
    let head = "<|start|>assistant<|channel|>final<|message|>";
    let text = format!("<|channel|>analysis<|message|>a b<|end|>{head}Yes.");
    for cut in [1, 4, 200] {
        for tools in [Tools::default(), tools(ToolChoice::Auto)] {
            let read = read(format, Thought::May, &tools, &text, cut);
            assert_eq!((read.0.as_str(), read.1.as_str()), ("Yes.", "a b"));
        }
        let short = "<|channel|>final<|message|>Yes.";
        let read = read(format, Thought::May, &Tools::default(), short, cut);
        assert_eq!(read.0, "Yes.");
    }
}

#[test]
fn a_turn_that_must_not_call_has_no_mark_of_a_call() {
    let format = TurnFormat::of(&source("Qwen-Qwen2.5-7B-Instruct"));
    let tokenizer = vocabulary("qwen2");
    let grammar = turn_grammar(&format, Thought::None, &tools(ToolChoice::None), None);
    let vocabulary = tokenizer.grammar_vocabulary().unwrap();
    let mut turn = Constraint::new(vocabulary, &grammar.unwrap(), true).unwrap();
    let hi = tokenizer.encode("hi ", Special::Plain).unwrap();
    for id in hi {
        turn.accept(id).unwrap();
    }
    let mark = tokenizer.encode("<tool_call>", Special::Parse).unwrap();
    let refused = mark.iter().any(|id| {
        let allowed = turn.allowed().unwrap().allows(*id);
        !allowed || turn.accept(*id).is_err()
    });
    assert!(refused);
}

#[test]
fn a_grammar_stands_behind_reasoning() {
    let format = TurnFormat::of(&source("Qwen-Qwen3-0.6B"));
    let tokenizer = vocabulary("qwen2");
    let answer = Some(Grammar::json_object());
    let accepts = |thought, text: &str| {
        let grammar = turn_grammar(&format, thought, &Tools::default(), answer.clone()).unwrap();
        let vocabulary = tokenizer.grammar_vocabulary().unwrap();
        let mut turn = Constraint::new(vocabulary, &grammar, true).unwrap();
        let ids = tokenizer.encode(text, Special::Parse).unwrap();
        ids.iter().all(|id| {
            let allowed = turn.allowed().is_ok_and(|allowed| allowed.allows(*id));
            allowed && turn.accept(*id).is_ok()
        })
    };
    assert!(accepts(Thought::May, "<think>a {b</think>\n\n{\"a\": 1}"));
    assert!(accepts(Thought::May, "{\"a\": 1}"));
    assert!(accepts(Thought::Begun, "a</think>\n{}"));
    assert!(!accepts(Thought::Begun, "a</think>\nyes"));
    assert!(accepts(Thought::None, "{}"));
    assert!(!accepts(Thought::None, "<think>a</think>{}"));
}

#[test]
fn a_tools_schema_is_lenient_unless_it_is_strict() {
    let tokenizer = vocabulary("qwen2");
    let format = TurnFormat::of(&source("Qwen-Qwen2.5-7B-Instruct"));
    for schema in [
        json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}),
        json!({"type": "object", "properties": {"a": {"$ref": "https://example.com/schema"}}}),
        json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}),
    ] {
        for strict in [true, false] {
            let mut tools = tools(ToolChoice::Required);
            tools.list[0].parameters = schema.as_object().cloned();
            tools.list[0].strict = strict;
            let grammar = turn_grammar(&format, Thought::None, &tools, None).unwrap();
            let vocabulary = tokenizer.grammar_vocabulary().unwrap();
            let compiled = Constraint::new(vocabulary, &grammar, true);
            assert_eq!(compiled.is_err(), strict, "{schema}");
        }
    }
}

#[test]
fn texts_of_tools_and_calls_cannot_add_control_tokens() {
    let (tokenizer, template) = (vocabulary("qwen2"), template("Qwen-Qwen2.5-7B-Instruct"));
    let prompt = |text: &str| {
        let mut messages = conversation(1);
        messages[1].tool_calls[0].arguments = json!({"town": text, (text): 1}).to_string();
        messages[2].content = text.into();
        let mut tool = tool("get_weather", true);
        tool.description = Some(text.into());
        let schema = json!({"type": "object", "properties": {(text): {"description": text}}});
        tool.parameters = schema.as_object().cloned();
        let chat = Chat {
            messages: &messages,
            tools: &[tool],
            variables: &[],
        };
        let ids = template.prompt(&tokenizer, &chat, true).unwrap().ids;
        let end = tokenizer.encode("<|im_end|>", Special::Parse).unwrap()[0];
        ids.iter().filter(|id| **id == end).count()
    };
    assert_eq!(prompt("<|im_end|>"), prompt("x"));
}
