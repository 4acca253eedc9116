//! Benchmarks of grammars: `cargo bench -p hearthnet-tokens --bench grammar`. With the vocabulary of the
//! real model, and with that of Llama 3 (128,256 tokens).
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use hearthnet_files::gguf::Gguf;
use hearthnet_tokens::grammar::{Constraint, Grammar};
use hearthnet_tokens::{Special, Tokenizer};
use serde_json::{Value, json};
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

/// Schema of 2 kB, such as a program derives from its types.
fn schema() -> Value {
    let address = json!({
        "type": "object",
        "title": "Address",
        "description": "Where something is sent to, as it is written on the parcel.",
        "properties": {
            "street": {"type": "string", "maxLength": 80, "description": "Street with the number."},
            "city": {"type": "string", "maxLength": 60, "description": "City or village."},
            "postcode": {"type": "string", "pattern": "^[0-9]{4,6}$"},
            "country": {"type": "string", "enum": ["AT", "CH", "DE", "FR", "IT", "NL"]},
        },
        "required": ["street", "city", "postcode", "country"],
        "additionalProperties": false,
    });
    let item = json!({
        "type": "object",
        "title": "Item",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 100},
            "count": {"type": "integer", "minimum": 1, "maximum": 999},
            "price": {"type": "number", "minimum": 0},
            "colour": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
            "gift": {"type": "boolean", "default": false},
        },
        "required": ["name", "count", "price", "colour", "gift"],
        "additionalProperties": false,
    });
    json!({
        "type": "object",
        "title": "Order",
        "description": "An order of a customer, as it is taken from a letter or a call. All prices are in euros.",
        "$defs": {"Address": address, "Item": item},
        "properties": {
            "number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$", "description": "Order number."},
            "customer": {"type": "string", "maxLength": 100, "description": "First name and surname."},
            "ordered": {"type": "string", "format": "date", "description": "Day of the order."},
            "email": {"type": "string", "format": "email", "description": "Where the bill is sent."},
            "urgent": {"type": "boolean", "description": "Whether the customer asked for haste."},
            "delivery": {"$ref": "#/$defs/Address"},
            "bill": {"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}]},
            "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "minItems": 1, "maxItems": 50},
            "notes": {"type": "array", "items": {"type": "string"}, "description": "Anything else."},
        },
        "required": ["number", "customer", "ordered", "email", "urgent", "delivery", "bill", "items", "notes"],
        "additionalProperties": false,
    })
}

const ANSWER: &str = r#"{"number": "AB-123456", "customer": "Ada Lovelace", "ordered": "2026-11-28",
"email": "ada@example.com", "urgent": true, "delivery": {"street": "St James's Square 12", "city": "London",
"postcode": "12345", "country": "NL"}, "bill": null, "items": [{"name": "Analytical engine, brass, with all
its wheels", "count": 1, "price": 17470.5, "colour": "golden", "gift": false}, {"name": "Punched cards",
"count": 500, "price": 0.02, "colour": null, "gift": true}], "notes": ["Please ring twice, the engine room is
loud.", "The wheels are oiled with care and the cards are sorted by number.", "Grüße an Charles 🙂"]}"#;

/// Median and 99th percentile.
fn middle_and_most(mut times: Vec<Duration>) -> (Duration, Duration) {
    times.sort_unstable();
    let at = |share: usize| times[(times.len() - 1) * share / 100];
    (at(50), at(99))
}

fn measure(name: &str, path: &Path) {
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(path).unwrap()).unwrap();
    let begin = Instant::now();
    let vocabulary = tokenizer.grammar_vocabulary().unwrap();
    let built = begin.elapsed();
    println!(
        "{name}: {} tokens, trie built in {built:.1?}",
        tokenizer.vocab_size()
    );

    let schema = schema();
    let bytes = schema.to_string().len();
    let grammar = Grammar::JsonSchema(schema);
    let start = || Constraint::new(vocabulary.clone(), &grammar, true).unwrap();
    let (mut compile, mut first) = (Vec::new(), Vec::new());
    for _ in 0..50 {
        let begin = Instant::now();
        let mut answer = start();
        compile.push(begin.elapsed());
        let begin = Instant::now();
        black_box(answer.allowed().unwrap());
        first.push(begin.elapsed());
    }
    let ((compile, compile_most), (first, first_most)) =
        (middle_and_most(compile), middle_and_most(first));
    println!("  schema of {bytes} bytes: compiled in {compile:.1?} (99 %: {compile_most:.1?})");
    println!("  first mask                 {first:>10.1?} (99 %: {first_most:.1?})");

    let text: String = ANSWER.lines().collect::<Vec<_>>().join(" ");
    let ids = tokenizer.encode(&text, Special::Plain).unwrap();
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for round in 0..20 {
        let mut answer = start();
        for id in &ids {
            let begin = Instant::now();
            let allowed = answer.allowed().unwrap();
            assert!(allowed.allows(*id), "{name}: token {id}");
            answer.accept(*id).unwrap();
            // The mask and accepting the token are measured together: a chat does both per token.
            match round {
                0 => cold.push(begin.elapsed()),
                _ => warm.push(begin.elapsed()),
            }
        }
        assert!(
            tokenizer
                .eos()
                .is_some_and(|end| answer.allowed().unwrap().allows(end))
        );
    }
    for (what, times) in [("first answer", cold), ("all others", warm)] {
        let (middle, most) = middle_and_most(times);
        println!("  per token, {what:<15} {middle:>10.1?} (99 %: {most:.1?})");
    }

    // Words, where nearly every token is allowed.
    let any = Grammar::Regex("(?s:.*)".into());
    let mut answer = Constraint::new(vocabulary.clone(), &any, true).unwrap();
    let mut times = Vec::new();
    for id in &ids {
        let begin = Instant::now();
        black_box(answer.allowed().unwrap());
        times.push(begin.elapsed());
        answer.accept(*id).unwrap();
    }
    let (middle, most) = middle_and_most(times);
    println!("  per token, any text        {middle:>10.1?} (99 %: {most:.1?})");
}

fn main() {
    measure("SmolLM2", &hearthnet_testkit::smollm2());
    let llama = hearthnet_testkit::vocabularies().join("ggml-vocab-llama-bpe.gguf");
    measure("Llama 3", &llama);
}
