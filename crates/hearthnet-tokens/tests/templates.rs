//! llama.cpp's collection of chat templates against Jinja2 as transformers configures it
//! (`data/templates/expected.json`), and typed control tokens in each of them.
#![allow(clippy::unwrap_used, clippy::panic)]

use hearthnet_testkit::assert_none_differ;
use hearthnet_tokens::fuzzing;
use hearthnet_tokens::template::{ChatTemplate, TemplateError, TemplateTime};
use minijinja::Value;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::LazyLock;

#[derive(serde::Deserialize)]
struct Reference {
    now: u64,
    /// Templates that are not in the collection.
    shapes: BTreeMap<String, String>,
    /// Variables of each conversation, in their original order.
    conversations: BTreeMap<String, BTreeMap<String, Value>>,
    cases: BTreeMap<String, BTreeMap<String, Expected>>,
}

/// Result of Jinja2 for a template and a conversation.
#[derive(Debug, serde::Deserialize)]
#[serde(untagged)]
enum Expected {
    Text(String),
    Hash {
        sha256: String,
    },
    /// The template refuses the conversation.
    Refused {
        refused: String,
    },
    /// The template fails.
    Failed {
        #[serde(rename = "failed")]
        _why: String,
    },
}

static REFERENCE: LazyLock<Reference> =
    LazyLock::new(|| serde_json::from_str(include_str!("data/templates/expected.json")).unwrap());

/// Jinja2 has a type for "safe" text, and escapes text added to it for HTML. In HearthNet a prompt
/// is never HTML.
const ESCAPED: &str = "meetkai-functionary-medium-v3.1";

fn source(name: &str) -> String {
    let file = hearthnet_testkit::chat_templates().join(format!("{name}.jinja"));
    let shape = REFERENCE.shapes.get(name).cloned();
    shape.unwrap_or_else(|| fs::read_to_string(file).unwrap())
}

fn template(name: &str) -> ChatTemplate {
    ChatTemplate::new(&source(name), "<s>", "</s>")
        .unwrap_or_else(|error| panic!("{name}: {error}"))
        .with_clock(|| TemplateTime::from_unix(REFERENCE.now))
}

/// Variables of a conversation, as a template gets them.
fn variables(conversation: &BTreeMap<String, Value>) -> Value {
    let messages = conversation["messages"].try_iter().unwrap();
    // transformers defines the reasoning under two names.
    let messages = messages.map(|message| {
        let thought = message.get_attr("reasoning_content").unwrap();
        let fields = message.try_iter().unwrap().map(|key| {
            let value = message.get_item(&key).unwrap();
            (key, value)
        });
        let again = (!thought.is_undefined()).then(|| (Value::from("thinking"), thought));
        Value::from_pairs(fields.chain(again))
    });
    let mut variables = BTreeMap::from([
        ("add_generation_prompt", Value::from(true)),
        ("bos_token", Value::from("<s>")),
        ("eos_token", Value::from("</s>")),
    ]);
    let given = conversation.iter();
    variables.extend(given.map(|(key, value)| (key.as_str(), value.clone())));
    variables.insert("messages", messages.collect());
    Value::from_pairs(variables)
}

fn sha256(text: &str) -> String {
    let digest = Sha256::digest(text.as_bytes());
    hex::encode(digest)
}

#[test]
fn the_reference_covers_the_whole_collection() {
    let files = fs::read_dir(hearthnet_testkit::chat_templates()).unwrap();
    let names = files.map(|file| file.unwrap().path());
    let names = names.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned());
    let names: BTreeSet<_> = names.chain(REFERENCE.shapes.keys().cloned()).collect();
    assert_eq!(names, REFERENCE.cases.keys().cloned().collect());
}

#[test]
fn every_template_gives_the_text_of_jinja2() {
    let (mut texts, mut refusals) = (0, 0);
    let mut wrong = Vec::new();
    for (name, cases) in &REFERENCE.cases {
        let template = template(name);
        for (conversation, expected) in cases {
            let got = template.render_variables(variables(&REFERENCE.conversations[conversation]));
            let right = match (&got, expected) {
                (Ok(text), Expected::Text(expected)) => text == expected,
                (Ok(text), Expected::Hash { sha256: hash }) => sha256(text) == *hash,
                (Err(TemplateError::Refused(why)), Expected::Refused { refused }) => why == refused,
                // Templates that fail in Python may work here, but must terminate.
                (_, Expected::Failed { .. }) => continue,
                _ => false,
            };
            match &got {
                Ok(_) => texts += 1,
                Err(_) => refusals += 1,
            }
            let escaped = name == ESCAPED
                && REFERENCE.conversations[conversation].contains_key("tools")
                && got.is_ok();
            if !right && !escaped {
                wrong.push(format!(
                    "{name}/{conversation}: {got:#?}\nexpected: {expected:#?}"
                ));
            }
        }
    }
    assert_none_differ(&wrong);
    assert!(texts >= 1100 && refusals >= 25, "{texts}, {refusals}");
}

#[test]
fn typed_text_is_never_a_control_token_in_any_template() {
    let names = regex::Regex::new(r"<[|｜/]?[\w｜▁|/:-]+>|\[/?[A-Z_]{3,}\]|<s>|</s>").unwrap();
    let mut compared = 0;
    for name in REFERENCE.cases.keys() {
        let source = source(name);
        let control: BTreeSet<&str> = names
            .find_iter(&source)
            .map(|found| found.as_str())
            .collect();
        let control: Vec<_> = control.into_iter().chain(["[x]"]).collect();
        compared += fuzzing::typed_text(&source, &control);
    }
    assert!(compared >= 250, "{compared}");
}
