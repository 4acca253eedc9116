//! Grammars over real vocabularies: what they lead to, where an answer may end, what is refused.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use hearthnet_files::gguf::Gguf;
use hearthnet_files::sampling::SamplerConfig;
use hearthnet_testkit::rows;
use hearthnet_tokens::grammar::{Constraint, Grammar, GrammarError};
use hearthnet_tokens::tokenizer::{Special, TokenKind, Tokenizer};
use hearthnet_tokens::{Detokenizer, Sampler};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::ApproximateTokEnv;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::sync::LazyLock;
use std::thread;

use crate::vocabularies::vocabulary;

static SMOLLM2: LazyLock<Tokenizer> = LazyLock::new(|| {
    Tokenizer::from_gguf(&Gguf::open(&hearthnet_testkit::smollm2()).unwrap()).unwrap()
});

fn start(tokenizer: &Tokenizer, grammar: &Grammar) -> Result<Constraint, GrammarError> {
    Constraint::new(tokenizer.grammar_vocabulary()?, grammar, true)
}

fn ids(tokenizer: &Tokenizer) -> std::ops::Range<u32> {
    0..u32::try_from(tokenizer.vocab_size()).unwrap()
}

fn ends(tokenizer: &Tokenizer) -> Vec<u32> {
    let all = ids(tokenizer);
    all.filter(|id| tokenizer.is_end_of_generation(*id))
        .collect()
}

/// Returns true if the grammar allows this text as an answer.
fn accepts(tokenizer: &Tokenizer, grammar: &Grammar, text: &str) -> bool {
    let mut answer = start(tokenizer, grammar).unwrap();
    for id in tokenizer.encode(text, Special::Plain).unwrap() {
        if !answer.allowed().is_ok_and(|allowed| allowed.allows(id)) {
            return false;
        }
        answer.accept(id).unwrap();
    }
    let end = ends(tokenizer)[0];
    answer.allowed().is_ok_and(|allowed| allowed.allows(end))
}

fn schema(schema: Value) -> Grammar {
    Grammar::JsonSchema(schema)
}

/// A person whose texts have a longest length, so that every answer ends.
fn person() -> Grammar {
    schema(json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
        },
        "required": ["name", "age", "likes"],
        "additionalProperties": false,
    }))
}

#[test]
fn a_grammar_leads_to_its_texts_and_to_no_other() {
    let lark = "start: greeting \" \" NAME\ngreeting: \"Hello\" | \"Hi\"\nNAME: /[A-Z][a-z]+/";
    let choice = Grammar::choice(&["a.b".into(), "a/b\n".into(), "a".into()]);
    for (grammar, good, bad) in rows! {
        person(), r#"{"name": "Ada", "age": 36, "likes": ["tea"]}"#
            => r#"{"name": "Ada", "age": 136, "likes": []}"#;
        person(), "{\n  \"name\": \"Zoë\",\n  \"age\": 3,\n  \"likes\": []\n}"
            => r#"{"age": 3, "name": "Zoë", "likes": []}"#;
        // White space is limited, because models repeat it for ever.
        Grammar::json_object(), r#"{"a": [1, {}]}"# => r#"{"a":  1}"#;
        Grammar::json_object(), "{}" => "[]";
        Grammar::Regex("[a-c]{2,3}/x".into()), "abc/x" => "abcd/x";
        Grammar::Lark(lark.into()), "Hi Ada" => "Hi ada";
        choice.clone(), "a.b" => "a_b";
        choice.clone(), "a/b\n" => "a/b";
        choice, "a" => "b";
    } {
        assert!(accepts(&SMOLLM2, &grammar, good), "{grammar:?} {good}");
        assert!(!accepts(&SMOLLM2, &grammar, bad), "{grammar:?} {bad}");
    }
}

#[test]
fn an_answer_may_end_exactly_where_its_grammar_may() {
    let ends = ends(&SMOLLM2);
    let mut answer = start(&SMOLLM2, &Grammar::Regex("ab?".into())).unwrap();
    let may_end = |answer: &mut Constraint| {
        let allowed = answer.allowed().unwrap();
        let count = ends.iter().filter(|end| allowed.allows(**end)).count();
        assert!(count == 0 || count == ends.len(), "all of them, or none");
        (
            count > 0,
            ids(&SMOLLM2).filter(|id| allowed.allows(*id)).count(),
        )
    };
    assert!(!may_end(&mut answer).0);
    let id = |text: &str| SMOLLM2.encode(text, Special::Plain).unwrap()[0];
    answer.accept(id("a")).unwrap();
    // The end, or the last letter.
    assert_eq!(may_end(&mut answer), (true, ends.len() + 1));
    answer.accept(id("b")).unwrap();
    assert_eq!(may_end(&mut answer), (true, ends.len()));
}

#[test]
fn a_token_that_was_not_allowed_is_an_error() {
    let mut answer = start(&SMOLLM2, &Grammar::json_object()).unwrap();
    let id = SMOLLM2.encode("x", Special::Plain).unwrap()[0];
    assert!(!answer.allowed().unwrap().allows(id));
    assert_eq!(answer.accept(id), Err(GrammarError::Stuck));
}

#[test]
fn no_grammar_leads_to_a_control_token() {
    let any = Grammar::Regex("(?s:.*)".into());
    for tokenizer in [&*SMOLLM2, &vocabulary("llama-spm")] {
        let allowed = start(tokenizer, &any).unwrap().allowed().unwrap();
        for id in ids(tokenizer).filter(|id| allowed.allows(*id)) {
            let kind = tokenizer.token_kind(id).unwrap();
            let end = tokenizer.is_end_of_generation(id);
            let structure = matches!(kind, TokenKind::Control | TokenKind::Unknown);
            assert!(end || !structure, "{id}");
        }
    }
    // Lark can name a token by its id.
    let control = ids(&SMOLLM2).find(|id| {
        let control = SMOLLM2.token_kind(*id) == Some(TokenKind::Control);
        control && !SMOLLM2.is_end_of_generation(*id)
    });
    let named = Grammar::Lark(format!("start: <[{}]> \"a\"", control.unwrap()));
    let allowed = start(&SMOLLM2, &named).and_then(|mut answer| answer.allowed());
    assert!(allowed.is_err());
}

#[test]
fn every_vocabulary_spells_json() {
    let names = "command-r deepseek-coder deepseek-llm falcon gpt-2 llama-bpe llama-spm mpt phi-3 \
                 qwen2 qwen35 refact starcoder";
    let text = r#"{"name": "Zoë 🙂", "age": 36, "likes": ["coffee", "tea"]}"#;
    for name in names.split_whitespace() {
        let tokenizer = vocabulary(name);
        assert!(accepts(&tokenizer, &person(), text), "{name}");
        assert!(!accepts(&tokenizer, &person(), "Sure!"), "{name}");
    }
}

/// Answer of a model that says anything.
fn babble(tokenizer: &Tokenizer, grammar: &Grammar, seed: u64) -> String {
    let mut answer = start(tokenizer, grammar).unwrap();
    let config = SamplerConfig {
        temperature: 1.0,
        seed: Some(seed),
        ..SamplerConfig::default()
    };
    let mut sampler = Sampler::new(config).unwrap();
    let mut detokenizer = Detokenizer::new(tokenizer);
    let mut text = String::new();
    // Rows of padding, as some models have.
    let logits = vec![0.0; tokenizer.vocab_size() + 3];
    for _ in 0..1000 {
        let allowed = answer.allowed().unwrap();
        let id = sampler.sample_allowed(&logits, Some(&allowed)).unwrap().id;
        assert!(allowed.allows(id));
        if tokenizer.is_end_of_generation(id) {
            return text + &detokenizer.finish();
        }
        text += &detokenizer.push(id);
        answer.accept(id).unwrap();
    }
    panic!("it does not end: {text}")
}

#[test]
fn whatever_a_model_says_is_valid() {
    for tokenizer in [&*SMOLLM2, &vocabulary("llama-spm"), &vocabulary("phi-3")] {
        for seed in 0..20 {
            let text = babble(tokenizer, &person(), seed);
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert!(
                value["name"].as_str().unwrap().chars().count() <= 12,
                "{text}"
            );
            assert!(value["age"].as_u64().unwrap() <= 120, "{text}");
            assert!(value["likes"].as_array().unwrap().len() <= 2, "{text}");
            assert_eq!(value.as_object().unwrap().len(), 3, "{text}");
            assert_eq!(text, babble(tokenizer, &person(), seed), "the same again");
        }
    }
}

#[test]
fn logits_of_tokens_that_are_not_allowed_do_not_count() {
    let mut answer = start(&SMOLLM2, &Grammar::Regex("[0-9]".into())).unwrap();
    let allowed = answer.allowed().unwrap();
    let id = |text: &str| SMOLLM2.encode(text, Special::Plain).unwrap()[0] as usize;
    let mut logits = vec![0.0; SMOLLM2.vocab_size()];
    (logits[id("a")], logits[id("7")]) = (9.0, 1.0);
    for (temperature, top_k, top_p) in [(0.0, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 0.1)] {
        let config = SamplerConfig {
            temperature,
            top_k,
            top_p,
            seed: Some(1),
            logprobs: Some(1),
            ..SamplerConfig::default()
        };
        let mut sampler = Sampler::new(config).unwrap();
        let sampled = sampler.sample_allowed(&logits, Some(&allowed)).unwrap();
        assert_eq!(sampled.id as usize, id("7"));
        // Log probabilities are those of the model, without the grammar.
        assert_eq!(sampled.top[0].0 as usize, id("a"));
        assert_eq!(sampler.sample(&logits).unwrap().id as usize, id("a"));
    }
}

#[test]
fn unsupported_features_are_refused_by_name() {
    for (given, name) in rows! {
        json!({"not": {"type": "string"}}) => "`not`";
        json!({"items": {"uniqueItems": true}}) => "`uniqueItems`";
        json!({"type": "string", "format": "phone"}) => "`phone`";
        json!({"oneOf": [{"minimum": 1}, {"maximum": 5}]}) => "`oneOf`";
        json!({"$ref": "https://example.com/a"}) => "https://example.com/a";
        json!({"items": {"$id": "a"}}) => "`$id`";
        json!({"x-guidance": {"lenient": true}}) => "`x-guidance`";
    } {
        let refused = start(&SMOLLM2, &schema(given.clone())).unwrap_err();
        assert!(
            matches!(refused, GrammarError::Unsupported(_)),
            "{given}: {refused:?}"
        );
        assert!(refused.to_string().contains(name), "{given}: {refused}");
    }
    let ahead = start(&SMOLLM2, &Grammar::Regex("(?=a)b".into())).unwrap_err();
    assert!(ahead.to_string().contains("look-around"), "{ahead}");
}

#[test]
fn malformed_grammars_are_refused() {
    for grammar in [
        schema(json!({"type": "cat"})),
        schema(json!({"$ref": "#/$defs/missing"})),
        schema(json!({"type": "string", "minLength": 3, "maxLength": 2})),
        schema(json!(false)),
        schema(json!(7)),
        Grammar::Regex("(".into()),
        Grammar::Lark("answer: \"a\"".into()),
        Grammar::Lark("start: missing".into()),
    ] {
        assert!(start(&SMOLLM2, &grammar).is_err(), "{grammar:?}");
    }
}

/// Result of a compilation, on a stack as large as callers give it.
fn compiled(grammar: Grammar) -> Result<(), GrammarError> {
    let vocabulary = SMOLLM2.grammar_vocabulary().unwrap();
    let compile = move || Constraint::new(vocabulary, &grammar, true).map(drop);
    let thread = thread::Builder::new().stack_size(64 << 20).spawn(compile);
    thread.unwrap().join().unwrap()
}

#[test]
fn hostile_grammars_are_refused_or_compiled_but_end_no_process() {
    let too_complex = |grammar| {
        let refused = compiled(grammar).unwrap_err();
        assert!(
            matches!(refused, GrammarError::TooComplex(_)),
            "{refused:?}"
        );
    };
    too_complex(Grammar::Lark(format!("start: \"{}\"", "x".repeat(70_000))));
    let patterns = (0..100).map(|n| (format!("^{n}x"), json!({})));
    let patterns = Value::Object(patterns.collect());
    too_complex(schema(json!({"patternProperties": patterns})));
    // A long chain of references, which is followed by recursion.
    let link = |n: u32| {
        (
            format!("a{n}"),
            json!({"$ref": format!("#/$defs/a{}", n + 1)}),
        )
    };
    let mut chain: serde_json::Map<String, Value> = (0..900).map(link).collect();
    chain.insert("a900".into(), json!({"type": "integer"}));
    compiled(schema(json!({"$ref": "#/$defs/a0", "$defs": chain}))).unwrap();
    // Two hundred alternatives, with two hundred each.
    let options = |of: &str| {
        let option = |n: u32| json!({"properties": {(format!("{of}{n}")): {"const": n}}});
        json!({"anyOf": (0..200).map(option).collect::<Vec<_>>()})
    };
    let product = json!({"type": "object", "allOf": [options("a"), options("b")]});
    too_complex(schema(product));
    // Few bytes, and a long regular expression.
    compiled(Grammar::Regex(
        "((((a{1,99}){1,99}){1,99}b){1,99}){1,99}".into(),
    ))
    .unwrap();
    let special = compiled(Grammar::Lark("start: <tool> \"a\"".into())).unwrap_err();
    assert!(special.to_string().contains("special token"), "{special}");
}

/// Figures of the public suite.
#[derive(Debug, Default, PartialEq, Eq)]
struct Figures {
    schemas: usize,
    /// Schemas that are not refused, and instances of them.
    accepted: usize,
    valid: usize,
    /// Valid instances that an answer may be.
    reached: usize,
    invalid: usize,
    /// Invalid instances that an answer may be.
    wrong: usize,
}

/// Runs the suite. `compile` returns a test whether an answer may be a text, or nothing if it refuses
/// the schema.
fn run_suite<F: Fn(&str) -> bool>(compile: impl Fn(&Value) -> Option<F>) -> Figures {
    let suite = include_str!("data/json_schema/suite.json");
    let suite: Vec<(String, String, Value, Vec<(String, bool)>)> =
        serde_json::from_str(suite).unwrap();
    let mut figures = Figures::default();
    for (_, _, schema, tests) in suite {
        figures.schemas += 1;
        let Some(may_be) = compile(&schema) else {
            continue;
        };
        figures.accepted += 1;
        for (text, valid) in tests {
            let may_be = usize::from(may_be(&text));
            match valid {
                true => {
                    (figures.valid, figures.reached) =
                        (figures.valid + 1, figures.reached + may_be);
                }
                false => {
                    (figures.invalid, figures.wrong) =
                        (figures.invalid + 1, figures.wrong + may_be);
                }
            }
        }
    }
    figures
}

#[test]
fn the_public_suite_is_answered_correctly_and_as_often_as_by_the_library_itself() {
    let ours = run_suite(|given| {
        let grammar = schema(given.clone());
        start(&SMOLLM2, &grammar).ok()?;
        Some(move |text: &str| accepts(&SMOLLM2, &grammar, text))
    });
    // The library by itself, with its own limits and white space, over bytes instead of tokens.
    let env = ApproximateTokEnv::single_byte_env();
    let mut factory = ParserFactory::new_simple(&env).unwrap();
    factory.quiet();
    let factory = &factory;
    let library = run_suite(move |given| {
        let grammar = TopLevelGrammar::from_json_schema(given.clone());
        factory.create_parser(grammar.clone()).ok()?;
        Some(move |text: &str| {
            let mut matcher = Matcher::new(factory.create_parser(grammar.clone()));
            let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
            let read = matcher.try_consume_tokens(&bytes);
            read.is_ok_and(|count| count == bytes.len())
                && matcher.is_accepting().is_ok_and(|yes| yes)
        })
    });
    println!("ours {ours:?}, the library {library:?}");
    assert_eq!(ours, library);
    assert_eq!(ours.wrong, 0, "{ours:?}");
    assert!(ours.accepted >= 120 && ours.reached >= 220, "{ours:?}");
}
