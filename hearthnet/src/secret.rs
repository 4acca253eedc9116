//! Secrets that a person or a program hands over: invite codes and passphrases. Never on the command
//! line, which every user of the machine can read: typed at a terminal, or a line of standard input or
//! of a file.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read, Write as _};
use std::path::Path;

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use zeroize::Zeroizing;

use crate::failure::{Failure, Kind};

/// Longest line, in bytes: many times an invite code with all its hints, and less than the 4095 at which a
/// terminal cuts it.
pub(crate) const MAX_BYTES: usize = 4000;

/// A line of standard input; on a terminal it is asked for first, and is seen when it is typed if
/// `shown`.
///
/// # Errors
/// If it is empty, too long or no text, or was given up with Ctrl-C.
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

/// The first line of a file: of `/dev/fd/3`, say, what a program left there.
pub(crate) fn in_file(path: &Path, what: &str) -> Result<Zeroizing<String>, Failure> {
    let mut file = File::open(path).map_err(|e| Failure::file("read", path, e))?;
    line(&mut file, what)
}

/// A line, without its end. Byte by byte: what follows belongs to whoever reads next.
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
        Err(_) => Err(unusable(what, "is no UTF-8 text")),
    }
}

fn unusable(what: &str, why: &str) -> Failure {
    Failure::new(Kind::Config, format!("the {what} {why}"))
        .hint("type it at a terminal, or write it as one line into standard input")
}

/// What is typed until Enter, while the terminal shows nothing of it.
fn typed_unseen(what: &str) -> Result<Zeroizing<String>, Failure> {
    /// As the terminal was; it is so again when this is dropped.
    struct Before(Termios);
    impl Drop for Before {
        fn drop(&mut self) {
            let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &self.0);
            let _ = writeln!(io::stderr());
        }
    }
    let before = tcgetattr(io::stdin()).map_err(io::Error::from)?;
    let mut hidden = before.clone();
    // Every key comes at once, Ctrl-C too: nobody is left with a terminal that shows nothing.
    let shows = LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG;
    hidden.local_modes.remove(shows);
    tcsetattr(io::stdin(), OptionalActions::Flush, &hidden).map_err(io::Error::from)?;
    let _before = Before(before);
    // Not earlier: what is typed before would be shown, and be gone.
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
            // Backspace takes a whole character.
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
    fn a_secret_is_one_line_and_what_follows_is_left_for_the_next() {
        let mut input = &b"hearth1abc\r\nsecond\nlast"[..];
        assert_eq!(*line(&mut input, "code").unwrap(), "hearth1abc");
        assert_eq!(*line(&mut input, "code").unwrap(), "second");
        assert_eq!(*line(&mut input, "code").unwrap(), "last");
        let ended = line(&mut input, "code").unwrap_err();
        assert_eq!(ended.to_string(), "the code is missing");
    }

    #[test]
    fn what_is_empty_too_long_or_no_text_is_no_secret() {
        let long = "x".repeat(MAX_BYTES + 1);
        for wrong in [&b"\n"[..], b"\xff\n", long.as_bytes()] {
            let error = line(&mut &wrong[..], "passphrase").unwrap_err();
            assert_eq!(error.kind, Kind::Config);
        }
        let full = "x".repeat(MAX_BYTES);
        assert_eq!(line(&mut full.as_bytes(), "x").unwrap().len(), MAX_BYTES);
    }
}
