//! Tokenizer and template of a file, checked together: `inspect` reports the refusals of `chat`.
#![allow(clippy::unwrap_used)]

use hearthnet_files::gguf::Value;
use hearthnet_files::gguf::writer::Writer;
use hearthnet_files::{Gguf, Manifest, ModelFile};
use hearthnet_testkit::{TinyLlama, with_metadata};
use hearthnet_tokens::ChatMessage;
use hearthnet_tokens::inspect::{Inspection, inspect};
use hearthnet_tokens::text::ModelText;

fn open(bytes: Vec<u8>) -> ModelFile {
    ModelFile::from_gguf(Gguf::from_bytes(bytes).unwrap()).unwrap()
}

/// The tiny model with other metadata.
fn tiny(without: &[&str], add: impl FnOnce(&mut Writer)) -> ModelFile {
    open(with_metadata(&TinyLlama::default().bytes(), without, add))
}

fn inspected(model: &ModelFile) -> Inspection {
    inspect(model, Manifest::of(model, &mut |_, _| {}).weights_id())
}

/// Template with marks that no id of the metadata names.
const OTHER_MARKS: &str =
    "{% for m in messages %}<|start|>{{ m.role }}<|sep|>{{ m.content }}<|im_end|>{% endfor %}";

/// The tiny model with [`OTHER_MARKS`], and their tokens of this type in its vocabulary.
fn other_marks(kind: i32) -> ModelFile {
    const KEYS: [&str; 3] = [
        "tokenizer.chat_template",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
    ];
    let tiny_file = Gguf::from_bytes(TinyLlama::default().bytes()).unwrap();
    let tokens = tiny_file.array(KEYS[1]).unwrap().unwrap();
    let mut tokens: Vec<&str> = tokens.strings().unwrap().collect();
    let kinds = tiny_file.array(KEYS[2]).unwrap().unwrap();
    let mut kinds: Vec<i32> = kinds.integers().unwrap().map(|kind| kind as i32).collect();
    for (id, mark) in [(300, "<|start|>"), (301, "<|sep|>")] {
        (tokens[id], kinds[id]) = (mark, kind);
    }
    tiny(&KEYS, |writer| {
        writer.set(KEYS[0], Value::String(OTHER_MARKS)).unwrap();
        writer.set_strings(KEYS[1], tokens).unwrap();
        writer.set_i32s(KEYS[2], &kinds).unwrap();
    })
}

#[test]
fn a_prompt_is_the_same_with_wrong_types_of_the_tokens_that_the_file_names() {
    let prompt = |model: &ModelFile| {
        let text = ModelText::of(model).unwrap();
        assert_eq!(text.warning(), None);
        let messages = [ChatMessage::user("Say hi. <|im_end|>")];
        let ids = text
            .template
            .unwrap()
            .prompt_ids(&text.tokenizer, &messages, true);
        ids.unwrap()
    };
    let right = prompt(&tiny(&[], |_| ()));
    assert!(right.starts_with(&[259]), "{right:?}");
    assert_eq!(right.iter().filter(|id| **id == 260).count(), 1);
    assert_eq!(prompt(&tiny(&["tokenizer.ggml.token_type"], |_| ())), right);
}

#[test]
fn a_template_whose_marks_are_plain_text_by_their_type_is_warned_of() {
    for plain in [1, 5] {
        let model = other_marks(plain);
        let warning = ModelText::of(&model).unwrap().warning().unwrap();
        for mark in ["\"<|start|>\"", "\"<|sep|>\""] {
            assert!(warning.contains(mark), "{warning}");
        }
        assert!(!warning.contains("im_end"), "{warning}");
        let inspection = inspected(&model);
        assert_eq!(inspection.chat_refused, None);
        assert_eq!(inspection.warning.as_ref(), Some(&warning));
        assert!(inspection.to_string().contains("plain text"));
    }
    for right in [3, 4] {
        assert_eq!(ModelText::of(&other_marks(right)).unwrap().warning(), None);
    }
}

#[test]
fn only_the_missing_part_is_named() {
    let no_pre = tiny(&["tokenizer.ggml.pre"], |_| ());
    let said = ModelText::of(&no_pre).unwrap_err().to_string();
    assert!(said.contains("`tokenizer.ggml.pre`"), "{said}");
    assert!(!said.contains("it has no tokenizer"), "{said}");
    let none = tiny(&["tokenizer.ggml.model"], |_| ());
    let said = ModelText::of(&none).unwrap_err().to_string();
    assert!(said.contains("it has no tokenizer"), "{said}");

    // Only named templates: `chat --raw` still works.
    let named = tiny(&["tokenizer.chat_template"], |writer| {
        let text = Value::String("{{ 1 }}");
        writer
            .set("tokenizer.chat_template.tool_use", text)
            .unwrap();
    });
    assert!(ModelText::of(&named).unwrap().template.is_none());
    let inspection = inspected(&named);
    assert_eq!(inspection.chat_refused, None);
    assert_eq!(inspection.container.named_chat_templates, ["tool_use"]);
    let shown = inspection.to_string();
    assert!(
        shown.contains("no default one; named ones, which are not used: tool_use"),
        "{shown}"
    );
    assert!(shown.contains("only `chat --raw`"), "{shown}");
}

#[test]
fn a_template_that_never_gives_a_prompt_is_refused_by_an_inspection() {
    let failing = tiny(&["tokenizer.chat_template"], |writer| {
        let text = Value::String("{{ messages.no_such_thing() }}");
        writer.set("tokenizer.chat_template", text).unwrap();
    });
    let refused = inspected(&failing).chat_refused.unwrap();
    assert!(refused.contains("chat template failed"), "{refused}");
}
