//! Bodies of the fuzz targets of the text side. Inputs are text (whatever is no UTF-8 is
//! replaced), so that seeds can be written and read by people.

use crate::stop::StopMatcher;
use crate::template::{ChatMessage, ChatTemplate};
use crate::tokenizer::{Special, TokenKind, Tokenizer, TokenizerParts};
use std::sync::LazyLock;

/// Reads the lines up to the first empty one as a vocabulary (`KIND TEXT` for a token, `+A B`
/// for a merge), and what follows as a text to encode. The first line names the pre-tokeniser;
/// with `llama` the vocabulary is a SentencePiece one, to which its bytes and the space are
/// added, and with `llama-` one without the space before a text. The score of a token is its
/// length, less the square of its kind.
///
/// # Panics
/// When plain text becomes structure, or does not come back from its ids.
pub fn tokenizer(bytes: &[u8]) {
    let input = String::from_utf8_lossy(bytes);
    let (vocabulary, text) = input.split_once("\n\n").unwrap_or((&input, ""));
    let mut lines = vocabulary.lines();
    let pre = lines.next().unwrap_or("");
    let mut types = Vec::new();
    let basics: Vec<_> = crate::tokenizer::sentencepiece_basics().collect();
    let mut parts = TokenizerParts {
        model: "gpt2",
        pre,
        ..Default::default()
    };
    if let "llama" | "llama-" = pre {
        parts.model = "llama";
        parts.add_space_prefix = Some(pre == "llama");
        parts.add_bos = Some(false);
        types.extend(basics.iter().map(|(_, kind)| *kind));
        parts
            .tokens
            .extend(basics.iter().map(|(text, _)| text.as_str()));
    }
    for line in lines {
        if let Some(merge) = line.strip_prefix('+') {
            parts.merges.push(merge);
        } else if let Some((kind, text)) = line.split_once(' ') {
            types.push(i128::from(kind.parse::<i8>().unwrap_or(1)));
            parts.tokens.push(text);
        }
    }
    let score = |(text, kind): (&&str, &i128)| text.len() as f32 - (kind * kind) as f32;
    parts.scores = parts.tokens.iter().zip(&types).map(score).collect();
    parts.token_types = Some(types);
    parts.eos = u32::try_from(text.len() % 8).ok();
    let tokenizer = match Tokenizer::new(&parts) {
        Ok(tokenizer) => tokenizer,
        Err(error) => {
            assert!(!error.to_string().contains(char::is_control));
            return;
        }
    };
    for special in [Special::Plain, Special::Parse] {
        let Ok(ids) = tokenizer.encode(text, special) else {
            continue;
        };
        let kind = |id: &u32| tokenizer.token_kind(*id);
        let structure = |id| matches!(kind(id), Some(TokenKind::Control | TokenKind::Unknown));
        assert!(ids.iter().all(|id| kind(id).is_some()));
        assert!(special == Special::Parse || !ids.iter().any(structure));
        if tokenizer.encodes(text) {
            // Both ways: a text that is parsed drops nothing here, as no model is called Phi-3.
            assert_eq!(tokenizer.decode_with_special(&ids), text);
        }
    }
}

/// Takes the pieces between NUL characters as the messages of a conversation.
///
/// # Panics
/// When a message adds or removes a control token of the prompt.
pub fn template(bytes: &[u8]) {
    static MODEL: LazyLock<Option<(Tokenizer, ChatTemplate)>> = LazyLock::new(small_model);
    let Some((tokenizer, template)) = &*MODEL else {
        return;
    };
    let input = String::from_utf8_lossy(bytes);
    let messages: Vec<_> = input.split('\0').take(16).map(ChatMessage::user).collect();
    let honest = vec![ChatMessage::user("hi"); messages.len()];
    let structure = |messages: &[ChatMessage]| {
        let mut ids = template
            .prompt_ids(tokenizer, messages, true)
            .unwrap_or_default();
        ids.retain(|id| tokenizer.token_kind(*id) == Some(TokenKind::Control));
        ids
    };
    assert_eq!(structure(&messages), structure(&honest));
}

/// A vocabulary of bytes and a few control tokens, with a template that trims, searches and
/// wraps messages.
fn small_model() -> Option<(Tokenizer, ChatTemplate)> {
    let bytes: Vec<String> = (0..=255).map(crate::tokenizer::written_byte).collect();
    let control = ["<|im_start|>", "<|im_end|>", "[x]", "</s>", "<|user|>"];
    let parts = TokenizerParts {
        model: "gpt2",
        pre: "qwen2",
        tokens: control
            .into_iter()
            .chain(bytes.iter().map(String::as_str))
            .collect(),
        token_types: Some([3; 5].into_iter().chain([1; 256]).collect()),
        ..TokenizerParts::default()
    };
    let source = "{% for m in messages %}<|{{ m.role }}|>[{{ m.content | trim }}]\
        {{ m.content.split('</t>')[-1] }}{% if '</t>' in m.content %}!{% endif %}<|im_end|>\
        {% endfor %}";
    Some((
        Tokenizer::new(&parts).ok()?,
        ChatTemplate::new(source, "", "").ok()?,
    ))
}

/// Reads the lines up to the first empty one as stop strings, and what follows as a text.
///
/// # Panics
/// When the text gives another result character by character than at once.
pub fn stop(bytes: &[u8]) {
    let input = String::from_utf8_lossy(bytes);
    let (stops, text) = input.split_once("\n\n").unwrap_or((&input, ""));
    let Ok(matcher) = StopMatcher::new(stops.lines().map(str::to_owned).collect()) else {
        return;
    };
    let run = |pieces: &mut dyn Iterator<Item = &str>| {
        let mut matcher = matcher.clone();
        let mut emitted: String = pieces.map(|piece| matcher.push(piece).emit).collect();
        emitted.push_str(&matcher.finish());
        (emitted, matcher.matched().map(str::to_owned))
    };
    let whole = run(&mut std::iter::once(text));
    assert_eq!(run(&mut text.split_inclusive(|_| true)), whole);
    let (emitted, matched) = whole;
    assert!(text.starts_with(&emitted));
    match matched {
        Some(stop) => assert!(text[emitted.len()..].starts_with(&stop)),
        None => assert!(emitted == text && stops.lines().all(|stop| !text.contains(stop))),
    }
}
