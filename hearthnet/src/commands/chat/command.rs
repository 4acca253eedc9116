//! Parser for a line of a chat: a message, or a command. Pure.

use std::path::PathBuf;

use crate::cli::args::SamplingArgs;

/// Text of `/help`.
pub(super) const HELP: &str = "\
/help               show this list
/reset              clear the conversation
/system [TEXT|off]  set the system message; without TEXT: show it
/save FILE          write the conversation to a file (JSON)
/load FILE          continue a conversation from a file
/model [MODEL]      switch to another model; without MODEL: show its name
/seed [N|off]       same seed, same answers; off: a random one for each
/set [KEY VALUE]    temperature, top_k, top_p, min_p, repetition_penalty,
                    presence_penalty, frequency_penalty, max_tokens, stop;
                    VALUE `default` is the model's own
/explain [on|off]   show times, seed and hosts of the last answer; on: of all
                    answers
/exit               leave, as Ctrl-D does

Ctrl-C stops an answer. Its text so far stays part of the conversation.
Put \"\"\" before and after a message of several lines. Pasted lines are one
message without them.
To send a message that begins with a slash, type two slashes.";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Line {
    Nothing,
    Message(String),
    Help,
    Reset,
    System(Option<String>),
    Save(PathBuf),
    Load(PathBuf),
    Model(Option<String>),
    Seed(Option<String>),
    Set(Option<(String, String)>),
    Explain(Option<bool>),
    Leave,
    /// Invalid command, with the reason.
    Wrong(String),
}

/// Command names, for completion.
pub(super) const NAMES: [&str; 10] = [
    "/help", "/reset", "/system", "/save", "/load", "/model", "/seed", "/set", "/explain", "/exit",
];

/// Whether a text that begins with `"""` is not closed yet.
pub(super) fn goes_on(text: &str) -> bool {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(rest) => !rest.contains(QUOTES),
        None => false,
    }
}

/// Whether the next line of a paste may belong to the same message: not behind a command, nor
/// behind quoted text.
pub(super) fn may_go_on(text: &str) -> bool {
    !text.starts_with('/') && !text.trim_start().starts_with(QUOTES)
}

const QUOTES: &str = "\"\"\"";

/// Parses typed or pasted text.
pub(super) fn read(text: &str) -> Line {
    let text = text.trim();
    let message = |text: &str| match text.trim().is_empty() {
        true => Line::Nothing,
        false => Line::Message(text.to_owned()),
    };
    if let Some(quoted) = text.strip_prefix(QUOTES) {
        let quoted = quoted
            .split(QUOTES)
            .next()
            .unwrap_or_default()
            .trim_matches('\n');
        return message(quoted);
    }
    let Some(command) = text.strip_prefix('/') else {
        return message(text);
    };
    if command.starts_with('/') {
        return Line::Message(command.to_owned());
    }
    let (name, rest) = command
        .split_once(char::is_whitespace)
        .unwrap_or((command, ""));
    let rest = rest.trim();
    let given = (!rest.is_empty()).then(|| rest.to_owned());
    match (name, given) {
        ("help" | "?", _) => Line::Help,
        ("reset" | "clear", None) => Line::Reset,
        ("system", text) => Line::System(text),
        ("save", Some(file)) => Line::Save(file.into()),
        ("load", Some(file)) => Line::Load(file.into()),
        ("save" | "load", None) => Line::Wrong(format!("/{name} needs the name of a file")),
        ("model", name) => Line::Model(name),
        ("seed", seed) => Line::Seed(seed),
        ("set", None) => Line::Set(None),
        ("set", Some(rest)) => match rest.split_once(|c: char| c.is_whitespace() || c == '=') {
            Some((key, value)) => Line::Set(Some((key.to_owned(), value.trim().to_owned()))),
            None => Line::Wrong("/set needs a setting and a value".into()),
        },
        ("explain", None) => Line::Explain(None),
        ("explain", Some(which)) => match which.as_str() {
            "on" => Line::Explain(Some(true)),
            "off" => Line::Explain(Some(false)),
            _ => Line::Wrong("/explain knows `on` and `off`".into()),
        },
        ("exit" | "quit" | "bye", None) => Line::Leave,
        (name, _) if NAMES.contains(&format!("/{name}").as_str()) => {
            Line::Wrong(format!("/{name} takes no argument"))
        }
        _ => Line::Wrong(format!("there is no command /{name}")),
    }
}

/// Returns `sampling` with one setting changed.
///
/// # Errors
/// A sentence for the user: unknown setting, or invalid value.
pub(super) fn set(sampling: &SamplingArgs, key: &str, value: &str) -> Result<SamplingArgs, String> {
    fn number<T: std::str::FromStr>(value: &str) -> Result<Option<T>, String> {
        match value {
            "default" => Ok(None),
            text => match text.parse() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(format!("{text:?} is not a valid number")),
            },
        }
    }
    let mut new = sampling.clone();
    match key.trim_start_matches('-').replace('-', "_").as_str() {
        "temperature" => new.temperature = number(value)?,
        "top_k" => new.top_k = number(value)?,
        "top_p" => new.top_p = number(value)?,
        "min_p" => new.min_p = number(value)?,
        "repetition_penalty" => new.repetition_penalty = number(value)?,
        "presence_penalty" => new.presence_penalty = number(value)?,
        "frequency_penalty" => new.frequency_penalty = number(value)?,
        "max_tokens" => new.max_tokens = number(value)?,
        "stop" if value == "default" => new.stop.clear(),
        "stop" => new.stop = vec![value.to_owned()],
        _ => return Err(format!("there is no setting {key:?}: /help lists them")),
    }
    new.check().map_err(|failure| failure.to_string())?;
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_message_unless_it_begins_with_a_slash() {
        let message = |text: &str| Line::Message(text.into());
        for (line, means) in [
            ("  Hello there \n", message("Hello there")),
            ("two\nlines", message("two\nlines")),
            ("", Line::Nothing),
            ("//etc is a path", message("/etc is a path")),
            ("a /help b", message("a /help b")),
            ("\"\"\"\n  a\n\n b\n\"\"\"", message("  a\n\n b")),
            ("\"\"\"one line\"\"\"", message("one line")),
            ("\"\"\"/reset\"\"\"", message("/reset")),
            ("\"\"\"\"\"\"", Line::Nothing),
            ("/help", Line::Help),
            ("/reset", Line::Reset),
            ("/system", Line::System(None)),
            ("/system Be brief.", Line::System(Some("Be brief.".into()))),
            ("/save a b.json", Line::Save("a b.json".into())),
            (
                "/set top-p 0.5",
                Line::Set(Some(("top-p".into(), "0.5".into()))),
            ),
            (
                "/set top_p=0.5",
                Line::Set(Some(("top_p".into(), "0.5".into()))),
            ),
            ("/explain on", Line::Explain(Some(true))),
            ("/seed 7", Line::Seed(Some("7".into()))),
            ("/quit", Line::Leave),
        ] {
            assert_eq!(read(line), means, "{line:?}");
        }
        for wrong in [
            "/save",
            "/reset now",
            "/nonsense",
            "/set temperature",
            "/explain it",
            "/",
        ] {
            assert!(matches!(read(wrong), Line::Wrong(_)), "{wrong:?}");
        }
    }

    #[test]
    fn quotes_go_on_until_they_end() {
        for open in ["\"\"\"", "\"\"\"a\nb", "  \"\"\"\n\"\""] {
            assert!(goes_on(open), "{open:?}");
        }
        for whole in ["\"\"\"a\"\"\"", "\"\"\"\n\"\"\"", "a \"\"\"", "\"\"", ""] {
            assert!(!goes_on(whole), "{whole:?}");
        }
    }

    #[test]
    fn a_setting_is_changed_only_to_what_it_can_be() {
        let none = SamplingArgs::default();
        let warm = set(&none, "temperature", "1.5").unwrap();
        assert_eq!(warm.temperature, Some(1.5));
        assert_eq!(
            set(&warm, "temperature", "default").unwrap().temperature,
            None
        );
        assert_eq!(set(&none, "--max-tokens", "7").unwrap().max_tokens, Some(7));
        assert_eq!(set(&none, "stop", "END").unwrap().stop, ["END"]);
        for (key, value) in [
            ("temperature", "warm"),
            ("top_p", "2"),
            ("max_tokens", "0"),
            ("max_tokens", "-1"),
            ("weather", "1"),
        ] {
            assert!(set(&none, key, value).is_err(), "{key} {value}");
        }
    }
}
