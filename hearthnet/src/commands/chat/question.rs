//! The question of `hearthnet chat QUESTION FILE... < FILE`: words, files, and standard input.

use std::ffi::OsString;
use std::fs::File;
use std::io::{IsTerminal as _, Read};
use std::path::Path;
use std::time::Duration;

use hearthnet_platform::terminal::is_silent;

use crate::cli::{Failure, Kind, bytes, failure, note};

/// Most bytes of a question with its files: several times the longest context of a model.
const MAX_BYTES: u64 = 8 << 20;

/// Part of the question.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    /// Name of the file; `None` for words and for standard input.
    file: Option<String>,
    text: String,
}

/// Returns the question, or `None` if none was given and standard input is a terminal. An argument
/// that is the path of a file stands for the file's content, any other for itself. Standard input,
/// unless it is a terminal, is appended.
pub(super) fn question(words: &[OsString], quiet: bool) -> Result<Option<String>, Failure> {
    let mut parts = Vec::new();
    let mut left = MAX_BYTES;
    for word in words {
        let path = Path::new(word);
        let shown = path.to_string_lossy();
        if !path.is_file() {
            let Some(text) = word.to_str() else {
                return Err(unreadable(
                    &shown,
                    "it is neither UTF-8 text nor the name of a file",
                ));
            };
            parts.push(Part {
                file: None,
                text: text.to_owned(),
            });
            continue;
        }
        let file = File::open(path).map_err(|e| unreadable(&shown, &e.to_string()))?;
        let text = text_of(file, &shown, &mut left)?;
        if !quiet {
            note(format!("reading {shown} ({})", bytes(text.len() as u64)));
        }
        parts.push(Part {
            file: Some(shown.into_owned()),
            text,
        });
    }
    let stdin = std::io::stdin();
    let terminal = stdin.is_terminal();
    if !terminal {
        if !quiet && is_silent(&stdin, Duration::from_secs(1)) {
            note(
                "waiting for the end of standard input, which belongs to the question; add `< /dev/null` to ask without it",
            );
        }
        let text = text_of(stdin.lock(), "standard input", &mut left)?;
        if !text.trim().is_empty() {
            parts.push(Part { file: None, text });
        }
    }
    if !parts.is_empty() {
        return Ok(Some(together(&parts)));
    }
    match terminal {
        true => Ok(None),
        false => Err(Failure::new(Kind::BadRequest, "there is no question: standard input is empty")
            .hint("write it after `hearthnet chat`, or to standard input; on a terminal, `hearthnet chat` starts a conversation")),
    }
}

/// Joins the parts in order. If there are several files, each is preceded by its name.
fn together(parts: &[Part]) -> String {
    let files = parts.iter().filter(|part| part.file.is_some()).count();
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        let before = index.checked_sub(1).and_then(|before| parts.get(before));
        text.push_str(match (before, &part.file) {
            (None, _) => "",
            // Words that the shell has split.
            (Some(Part { file: None, text }), None)
                if !text.contains('\n') && !part.text.contains('\n') =>
            {
                " "
            }
            _ => "\n\n",
        });
        if let (Some(name), true) = (&part.file, files > 1) {
            text.push_str(name);
            text.push_str(":\n");
        }
        text.push_str(part.text.trim_end());
    }
    text
}

fn text_of(source: impl Read, name: &str, left: &mut u64) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let read = source.take(*left + 1).read_to_end(&mut bytes);
    read.map_err(|e| unreadable(name, &e.to_string()))?;
    *left = left
        .checked_sub(bytes.len() as u64)
        .ok_or_else(|| unreadable(name, "it is longer than any model reads"))?;
    String::from_utf8(bytes).map_err(|_| unreadable(name, "it is not UTF-8 text"))
}

fn unreadable(name: &str, why: &str) -> Failure {
    failure!(BadRequest, "cannot read {name}: {why}")
        .hint("a question is made of words and of text files")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(file: Option<&str>, text: &str) -> Part {
        Part {
            file: file.map(str::to_owned),
            text: text.to_owned(),
        }
    }

    #[test]
    fn a_question_is_its_words_then_its_files() {
        for (parts, text) in [
            (vec![part(None, "Why?")], "Why?"),
            (vec![part(None, "Why"), part(None, "so?")], "Why so?"),
            (
                vec![part(None, "Summarise"), part(None, "a\nb\n")],
                "Summarise\n\na\nb",
            ),
            (vec![part(Some("f"), "a\n")], "a"),
            (
                vec![
                    part(None, "Compare"),
                    part(Some("f"), "a"),
                    part(Some("g"), "b\n"),
                ],
                "Compare\n\nf:\na\n\ng:\nb",
            ),
        ] {
            assert_eq!(together(&parts), text);
        }
    }

    #[test]
    fn input_that_is_not_utf8_or_too_long_is_refused() {
        let mut left = 10;
        assert_eq!(text_of(&b"12345"[..], "f", &mut left).unwrap(), "12345");
        assert_eq!(left, 5);
        assert!(text_of(&b"123456"[..], "f", &mut left).is_err());
        assert!(text_of(&b"\xff"[..], "f", &mut left).is_err());
    }
}
