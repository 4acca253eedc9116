//! Reads secrets: invite codes and passphrases. Never from the command line, which every user of
//! the machine can read, but from a terminal, or from a line of standard input or of a file.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read, Write as _};
use std::path::Path;

use hearthnet_platform::terminal::HiddenInput;
use zeroize::Zeroizing;

use crate::cli::failure::{Failure, Kind, failure};

/// Longest line, in bytes: many times an invite code with all its hints, and less than the 4095
/// bytes at which a terminal cuts it.
pub(crate) const MAX_BYTES: usize = 4000;

/// Reads a line of standard input. On a terminal it prompts first, and hides the input unless
/// `shown`.
///
/// # Errors
/// Returns an error if the line is empty, too long or not UTF-8, or after Ctrl-C.
pub(crate) fn ask(what: &str, shown: bool) -> Result<Zeroizing<String>, Failure> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return line(&mut stdin.lock(), what);
    }
    if !shown {
        return typed_unseen(what);
    }
    let _ = write!(io::stderr(), "{what}: ");
    line(&mut stdin.lock(), what)
}

/// Reads the first line of a file, for example of `/dev/fd/3`.
pub(crate) fn in_file(path: &Path, what: &str) -> Result<Zeroizing<String>, Failure> {
    let mut file = File::open(path).map_err(|e| Failure::file("read", path, e))?;
    line(&mut file, what)
}

/// Reads a line without its end. Reads single bytes, because the rest of the input belongs to the
/// next reader.
fn line(source: &mut impl Read, what: &str) -> Result<Zeroizing<String>, Failure> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_BYTES));
    let mut byte = [0];
    while source.read(&mut byte)? == 1 && byte != *b"\n" {
        if bytes.len() == MAX_BYTES {
            return Err(unusable(what, "is too long"));
        }
        bytes.push(byte[0]);
    }
    finished(&bytes, what)
}

fn finished(bytes: &[u8], what: &str) -> Result<Zeroizing<String>, Failure> {
    let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
    match str::from_utf8(bytes) {
        Ok("") => Err(unusable(what, "is missing")),
        Ok(text) => Ok(Zeroizing::new(text.to_owned())),
        Err(_) => Err(unusable(what, "is not UTF-8 text")),
    }
}

fn unusable(what: &str, why: &str) -> Failure {
    failure!(Config, "the {what} {why}")
        .hint("type it at a terminal, or write it as one line into standard input")
}

/// Reads a line from the terminal without echo.
fn typed_unseen(what: &str) -> Result<Zeroizing<String>, Failure> {
    /// Ends the line of the prompt when dropped.
    struct EndOfLine;
    impl Drop for EndOfLine {
        fn drop(&mut self) {
            let _ = writeln!(io::stderr());
        }
    }
    let _hidden = HiddenInput::by_key()?;
    let _line = EndOfLine;
    // Prompt only now: earlier input would be echoed, and then discarded.
    let _ = write!(io::stderr(), "{what}: ");
    let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_BYTES));
    let mut key = [0];
    loop {
        let end = io::stdin().lock().read(&mut key)? == 0;
        match key[0] {
            _ if end => break,
            b'\r' | b'\n' => break,
            // Ctrl-C, Ctrl-D.
            3 | 4 => return Err(Failure::new(Kind::Interrupted, "nothing was changed")),
            // Backspace removes a whole character.
            8 | 127 => while bytes.pop().is_some_and(|byte| byte & 0xc0 == 0x80) {},
            // Ctrl-U.
            21 => bytes.clear(),
            _ if bytes.len() == MAX_BYTES => return Err(unusable(what, "is too long")),
            byte => bytes.push(byte),
        }
    }
    finished(&bytes, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_one_line_and_the_rest_is_not_consumed() {
        let mut input = &b"hearth1abc\r\nsecond\nlast"[..];
        assert_eq!(*line(&mut input, "code").unwrap(), "hearth1abc");
        assert_eq!(*line(&mut input, "code").unwrap(), "second");
        assert_eq!(*line(&mut input, "code").unwrap(), "last");
        let ended = line(&mut input, "code").unwrap_err();
        assert_eq!(ended.to_string(), "the code is missing");
    }

    #[test]
    fn an_empty_long_or_non_utf8_secret_is_refused() {
        let long = "x".repeat(MAX_BYTES + 1);
        for wrong in [&b"\n"[..], b"\xff\n", long.as_bytes()] {
            let error = line(&mut &wrong[..], "passphrase").unwrap_err();
            assert_eq!(error.kind, Kind::Config);
        }
        let full = "x".repeat(MAX_BYTES);
        assert_eq!(line(&mut full.as_bytes(), "x").unwrap().len(), MAX_BYTES);
    }
}
