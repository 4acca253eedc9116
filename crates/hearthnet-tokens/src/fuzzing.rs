//! Bodies of the fuzz targets of model files and of the text code, so that tests can replay the
//! fuzzer's findings. Not a public API. Inputs of the text code are text (invalid UTF-8 is
//! replaced), so that people can read and write seeds.

use crate::inspect::inspect;
use crate::stop::StopMatcher;
use crate::template::{ChatMessage, ChatTemplate, Role};
use crate::tokenizer::{Special, TokenKind, Tokenizer};
use hearthnet_files::tokenizer_parts::TokenizerParts;
use std::sync::LazyLock;

/// Reads bytes as a GGUF file, checks its contents, and describes a model.
///
/// # Panics
/// If a promise is broken.
pub fn gguf(bytes: &[u8]) {
    let Some((model, manifest)) = hearthnet_files::fuzzing::gguf(bytes) else {
        return;
    };
    let text = inspect(&model, manifest.weights_id()).to_string();
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'));
}

/// Reads the lines up to the first empty one as a vocabulary (`KIND TEXT` for a token, `+A B` for a
/// merge), and the rest as a text to encode.
///
/// The first line names the pre-tokeniser. `llama` means a SentencePiece vocabulary with bytes and
/// the space added; `llama-` one without the space prefix. A token's score is its length minus the
/// square of its kind.
///
/// # Panics
/// If plain text becomes a control token, or decoding does not restore the text.
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
            // Also with parsing: no white space is dropped here, since the model is not called
            // Phi-3.
            assert_eq!(tokenizer.decode_with_special(&ids), text);
        }
    }
}

/// Uses the pieces between NUL characters as the messages of a conversation.
///
/// # Panics
/// If a message adds or removes a control token of the prompt.
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

/// Small vocabulary, with a template that trims, searches and wraps messages.
fn small_model() -> Option<(Tokenizer, ChatTemplate)> {
    let control = ["<|im_start|>", "<|im_end|>", "[x]", "</s>", "<|user|>"];
    let source = "{% for m in messages %}<|{{ m.role }}|>[{{ m.content | trim }}]\
        {{ m.content.split('</t>')[-1] }}{% if '</t>' in m.content %}!{% endif %}<|im_end|>\
        {% endfor %}";
    let template = ChatTemplate::new(source, "", "").ok()?;
    Some((byte_tokenizer(&control)?, template))
}

/// Vocabulary of bytes and control tokens.
fn byte_tokenizer(control: &[&str]) -> Option<Tokenizer> {
    let bytes: Vec<String> = (0..=255).map(crate::tokenizer::written_byte).collect();
    let words = bytes.iter().map(String::as_str);
    let kinds = std::iter::repeat_n(3, control.len()).chain([1; 256]);
    let parts = TokenizerParts {
        model: "gpt2",
        pre: "qwen2",
        tokens: control.iter().copied().chain(words).collect(),
        token_types: Some(kinds.collect()),
        ..TokenizerParts::default()
    };
    Tokenizer::new(&parts).ok()
}

/// Renders messages that contain the model's `control` tokens, whole and in pieces, with every
/// role. Returns the number of conversations that the template accepted.
///
/// # Panics
/// If a message adds or removes a control token of the prompt.
pub fn typed_text(source: &str, control: &[&str]) -> usize {
    let (Some(tokenizer), Ok(template)) = (
        byte_tokenizer(control),
        ChatTemplate::new(source, "<s>", "</s>"),
    ) else {
        return 0;
    };
    let attack = format!("x {} y", control.concat());
    let pieces: String = control
        .iter()
        .map(|token| token.trim_matches(|c: char| !c.is_alphanumeric()))
        .collect();
    let conversations: [&[Role]; 4] = [
        &[Role::User],
        &[Role::System, Role::User],
        &[Role::User, Role::Assistant, Role::User],
        &[Role::System, Role::User, Role::Assistant, Role::Tool],
    ];
    let structure = |roles: &[Role], text: &str| {
        let messages: Vec<_> = roles
            .iter()
            .map(|role| ChatMessage::new(*role, text))
            .collect();
        let ids = template.prompt_ids(&tokenizer, &messages, true).ok()?;
        let control = |id: &u32| tokenizer.token_kind(*id) == Some(TokenKind::Control);
        Some(ids.into_iter().filter(control).collect::<Vec<_>>())
    };
    let mut compared = 0;
    for roles in conversations {
        let honest = structure(roles, "x hi y");
        for text in [&attack, &pieces] {
            assert_eq!(structure(roles, text), honest, "{roles:?} {text}");
        }
        compared += usize::from(honest.is_some());
    }
    compared
}

/// Reads bytes as a template, and renders it. The targets are templates that never end or exhaust
/// memory.
///
/// # Panics
/// If an error message contains characters unfit for a terminal.
pub fn template_source(bytes: &[u8]) {
    let source = String::from_utf8_lossy(bytes);
    let messages = [ChatMessage::system("Be brief."), ChatMessage::user("Hi")];
    let rendered = ChatTemplate::new(&source, "<s>", "</s>")
        .and_then(|template| template.render(&messages, true));
    if let Err(error) = rendered {
        assert!(!error.to_string().contains(char::is_control));
    }
}

/// Reads the lines up to the first empty one as stop strings, and the rest as a text.
///
/// # Panics
/// If the result character by character differs from the result in one piece.
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
