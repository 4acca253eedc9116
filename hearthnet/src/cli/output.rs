//! Output for people: tables, sizes, progress. Answers go to standard output, everything else to
//! standard error.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

use hearthnet_platform::terminal::{self, Handle};
use hearthnet_text::{is_plain, sanitize, sanitize_text};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::failure::{Failure, Kind};
use crate::cli::wrap::Wrap;

/// Width of a terminal that does not report it.
const COLUMNS: usize = 80;

/// Formats a size in bytes with a suitable unit (powers of 1024).
pub(crate) fn bytes(n: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.iter().find(|(power, _)| n >> power > 0) {
        Some((power, unit)) => format!("{:.1} {unit}", n as f64 / (1u64 << power) as f64),
        None => format!("{n} B"),
    }
}

/// Formats a number of things: `1 message`, `2 messages`. `noun` is the singular.
pub(crate) fn counted(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

pub(crate) fn threads(n: usize) -> String {
    match n {
        1 => "one thread".to_owned(),
        n => format!("{n} threads"),
    }
}

/// Formats columns as wide as their widest cell: text left-aligned, numbers right-aligned. `header`
/// has their names, separated by `|`.
pub(crate) fn table<R: AsRef<[String]>>(header: &str, rows: impl IntoIterator<Item = R>) -> String {
    let header: Vec<&str> = header.split('|').collect();
    let rows: Vec<R> = rows.into_iter().collect();
    let cells = |c: usize| rows.iter().filter_map(move |row| row.as_ref().get(c));
    // For each column: its width, and whether it holds text.
    let columns = header.iter().enumerate().map(|(c, head)| {
        let width = cells(c).map(|s| s.chars().count()).max().unwrap_or(0);
        let number =
            |s: &String| s.starts_with(|ch: char| ch.is_ascii_digit() || "-+.".contains(ch));
        let text = cells(c).any(|s| !s.is_empty() && !number(s));
        (width.max(head.chars().count()), text)
    });
    let columns: Vec<(usize, bool)> = columns.collect();
    let line = |cells: Vec<&str>| {
        let mut line = String::from(" ");
        for (&(width, text), cell) in columns.iter().zip(cells) {
            line += &match text {
                true => format!(" {cell:<width$} "),
                false => format!(" {cell:>width$} "),
            };
        }
        line.truncate(line.trim_end().len());
        line + "\n"
    };
    let all = rows
        .iter()
        .map(|row| line(row.as_ref().iter().map(String::as_str).collect()));
    std::iter::once(line(header)).chain(all).collect()
}

/// First digits of an id, as people see them.
pub(crate) fn first_digits(id: &[u8; 32]) -> String {
    let mut digits = hex::encode(id);
    digits.truncate(8);
    digits
}

/// Formats a time as `2026-11-21 06:40:04 UTC`, or as a number beyond the year 9999.
pub(crate) fn when(unix_ms: u64) -> String {
    let seconds = i64::try_from(unix_ms / 1000).unwrap_or(i64::MAX);
    match time::OffsetDateTime::from_unix_timestamp(seconds) {
        Ok(t) => {
            let (hour, minute, second) = t.to_hms();
            format!("{} {hour:02}:{minute:02}:{second:02} UTC", t.date())
        }
        Err(_) => format!("{unix_ms} ms"),
    }
}

/// Formats a duration with a suitable unit: `45 s`, `3 min`, `23 h`, `6 d`.
pub(crate) fn span(ms: u64) -> String {
    let seconds = ms / 1000;
    let rounded = |unit: u64| (seconds + unit / 2) / unit;
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", rounded(60)),
        7200..172_800 => format!("{} h", rounded(3600)),
        _ => format!("{} d", rounded(86_400)),
    }
}

/// Abilities of the terminal on standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TerminalStyle {
    /// Whether a written line can be overwritten.
    pub(crate) moves: bool,
    colours: bool,
}

impl TerminalStyle {
    pub(crate) fn of_this_terminal() -> Self {
        let set = |name: &str| std::env::var(name).unwrap_or_default();
        Self::of(io::stderr().is_terminal(), &set("TERM"), &set("NO_COLOR"))
    }

    fn of(terminal: bool, term: &str, no_color: &str) -> Self {
        // A terminal without a known type may not support escape sequences.
        let moves = terminal && !["", "dumb", "cons25", "emacs"].contains(&term);
        Self {
            moves,
            // https://no-color.org: any value but the empty one.
            colours: moves && no_color.is_empty(),
        }
    }

    /// Style of notices beside an answer.
    pub(crate) fn dim(&self, text: &str) -> Styled {
        self.styled("2", text)
    }

    pub(crate) fn red(&self, text: &str) -> Styled {
        self.styled("31", text)
    }

    /// Style of a prompt for the line editor.
    pub(crate) fn bold(&self, text: &'static str) -> String {
        self.styled("1", text).to_string()
    }

    fn styled(&self, code: &'static str, text: &str) -> Styled {
        Styled {
            code: self.colours.then_some(code),
            text: text.to_owned(),
        }
    }
}

/// Width of a terminal, in columns.
pub(crate) fn columns(terminal: impl Handle) -> usize {
    terminal::columns(terminal).unwrap_or(COLUMNS)
}

/// Text with an optional colour. Untrusted escape sequences in it are sanitized; only the colour's
/// own are written.
pub(crate) struct Styled {
    code: Option<&'static str>,
    text: String,
}

impl Styled {
    /// Breaks lines between words, at most `columns` wide.
    fn wrapped(self, columns: usize) -> Self {
        let mut wrap = Wrap::default();
        Self {
            text: wrap.push(&self.text, columns) + &wrap.finish(columns),
            ..self
        }
    }
}

impl<T: AsRef<str>> From<T> for Styled {
    fn from(text: T) -> Self {
        Self {
            code: None,
            text: text.as_ref().to_owned(),
        }
    }
}

impl std::fmt::Display for Styled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = sanitize_text(&self.text);
        match self.code {
            Some(code) => write!(f, "\u{1b}[{code}m{text}\u{1b}[0m"),
            None => f.write_str(&text),
        }
    }
}

/// Spinner with a short text on standard error, on a terminal only, until dropped.
pub(crate) struct Spinner(ProgressBar);

impl Spinner {
    pub(crate) fn new(style: &TerminalStyle, what: &str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        if style.moves {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
                bar.set_style(style.tick_chars("|/-\\ "));
            }
            bar.set_message(sanitize(what).into_owned());
            bar.enable_steady_tick(std::time::Duration::from_millis(120));
        }
        Self(bar)
    }

    /// Changes the text.
    pub(crate) fn say(&self, what: &str) {
        self.0.set_message(sanitize(what).into_owned());
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Prints one JSON value and a newline. Control characters are escaped, which does not change the
/// JSON.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let json = serde_json::to_string(value).map_err(Failure::internal)?;
    print_bytes(escaped(&json) + "\n")
}

/// Prints a result: with `json` as JSON, else as text.
pub(crate) fn print_result(
    json: bool,
    result: &impl serde::Serialize,
    text: impl FnOnce() -> String,
) -> Result<(), Failure> {
    match json {
        true => print_json(result),
        false => print(text()),
    }
}

/// Escapes every control character of a JSON text as `\uXXXX`. They occur only inside of strings.
pub(crate) fn escaped(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match is_plain(c) {
            true => out.push(c),
            false => {
                let mut units = [0; 2];
                let units = c.encode_utf16(&mut units).iter();
                out.extend(units.map(|unit| format!("\\u{unit:04x}")));
            }
        }
    }
    out
}

/// Prints sanitized text to standard output, and flushes.
pub(crate) fn print(text: impl AsRef<str>) -> Result<(), Failure> {
    print_bytes(sanitize_text(text.as_ref()).as_bytes())
}

/// Prints bytes unchanged to standard output, and flushes.
pub(crate) fn print_bytes(bytes: impl AsRef<[u8]>) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(bytes.as_ref())?;
    out.flush()?;
    Ok(())
}

/// Prints a line to standard error, wrapped on a terminal. Errors are ignored, because a closed
/// standard error is no failure.
pub(crate) fn note(line: impl Into<Styled>) {
    let (mut line, error) = (line.into(), io::stderr());
    if error.is_terminal() {
        line = line.wrapped(columns(&error));
    }
    let _ = writeln!(io::stderr(), "{line}");
}

/// Reports a failure to the user, and with `json` also as JSON.
pub(crate) fn report(failure: &Failure, json: bool) {
    if failure.kind == Kind::OutputClosed {
        return;
    }
    if json {
        // The reader of the JSON may be gone; the exit status still tells.
        let _ = print_json(&failure.to_json());
    }
    note(format!("error: {failure}"));
    if let Some(hint) = failure.hint_text() {
        note(format!("hint: {hint}"));
    }
}

/// Log writer that sanitizes each record to one line. Records must be written in one call.
pub(crate) struct Sanitized<W>(pub(crate) W);

impl<W: io::Write> io::Write for Sanitized<W> {
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(record);
        let line = text.strip_suffix('\n').unwrap_or(&text);
        self.0.write_all((sanitize(line) + "\n").as_bytes())?;
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Asks for confirmation on a terminal. Without a terminal returns `unasked`, or an error if that
/// is `None`.
pub(crate) fn ask(question: &str, unasked: Option<bool>) -> Result<bool, Failure> {
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return unasked.ok_or_else(|| {
            Failure::new(
                Kind::Config,
                "confirmation needed, but this is not a terminal",
            )
            .hint("confirm with --yes")
        });
    }
    Ok(answer(question, "[y/N]")?.unwrap_or(false))
}

/// Asks for confirmation of a change on a terminal, unless it was given with `yes`. Without a
/// terminal the command itself is the confirmation.
pub(crate) fn confirm(yes: bool, question: &str) -> Result<(), Failure> {
    match yes || ask(question, Some(true))? {
        true => Ok(()),
        false => Err(Failure::new(Kind::Interrupted, "nothing was changed")),
    }
}

/// Asks a question; `None` for an empty answer.
pub(crate) fn answer(question: &str, choice: &str) -> Result<Option<bool>, Failure> {
    let question = sanitize_text(question);
    let _ = write!(io::stderr(), "{question} {choice} ");
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(match answer.trim().to_ascii_lowercase().as_str() {
        "" => None,
        answer => Some(matches!(answer, "y" | "yes")),
    })
}

/// Progress bar on standard error, on a terminal only, shown after 300 ms, until dropped.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Shows the progress of `work`, which reports done and total bytes.
    pub(crate) fn during<T>(
        what: &'static str,
        work: impl FnOnce(&mut dyn FnMut(u64, u64)) -> T,
    ) -> T {
        let progress = Self::new(what);
        work(&mut |done, total| progress.set(done, total))
    }

    pub(crate) fn new(what: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        Self(bar.with_message(what))
    }

    /// Sets `done` of `total` bytes; a total of 0 is unknown.
    pub(crate) fn set(&self, done: u64, total: u64) {
        let bar = &self.0;
        if bar.is_hidden()
            && TerminalStyle::of_this_terminal().moves
            && bar.elapsed().as_millis() > 300
        {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template(
                "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            );
            if let Ok(style) = style {
                bar.set_style(style.progress_chars("=> "));
            }
        }
        if total > 0 {
            bar.set_length(total);
        }
        bar.set_position(done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_use_the_unit_that_a_person_would() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(98_362_432), "93.8 MiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
    }

    #[test]
    fn moments_and_lengths_of_time_read_as_people_write_them() {
        assert_eq!(when(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(when(1_800_000_000_999), "2027-01-15 08:00:00 UTC");
        assert_eq!(when(u64::MAX), format!("{} ms", u64::MAX));
        for (seconds, text) in [
            (0, "0 s"),
            (119, "119 s"),
            (120, "2 min"),
            (86_399, "24 h"),
            (604_799, "7 d"),
        ] {
            assert_eq!(span(seconds * 1000), text);
        }
    }

    #[test]
    fn colours_are_for_terminals_that_have_them_and_people_who_want_them() {
        let plain = |terminal, term: &str, no_color: &str| {
            TerminalStyle::of(terminal, term, no_color)
                .dim("x")
                .to_string()
                == "x"
        };
        assert!(!plain(true, "xterm-256color", ""));
        assert!(plain(false, "xterm-256color", ""));
        assert!(plain(true, "dumb", ""));
        assert!(plain(true, "", ""));
        assert!(plain(true, "xterm-256color", "1"));
        // NO_COLOR does not disable the spinner.
        assert!(TerminalStyle::of(true, "xterm", "1").moves);
        assert!(!TerminalStyle::of(true, "dumb", "").moves);
    }

    #[test]
    fn a_note_is_broken_between_words_and_keeps_its_colour() {
        let style = TerminalStyle::of(true, "xterm", "");
        let red = style.red("error: there is no question: standard input is empty");
        assert_eq!(
            red.wrapped(20).to_string(),
            "\u{1b}[31merror: there is no\nquestion: standard\ninput is empty\u{1b}[0m"
        );
        let lines = Styled::from("one\n  two three").wrapped(8);
        assert_eq!(lines.to_string(), "one\n  two\nthree");
    }

    #[test]
    fn untrusted_text_is_sanitized() {
        let evil = "kim\u{1b}[2J\u{9b}31m\u{202e}\u{7}";
        assert_eq!(Styled::from(evil).to_string(), "kim[2J31m");
        let dim = TerminalStyle::of(true, "xterm", "").dim(evil).to_string();
        assert_eq!(dim, "\u{1b}[2mkim[2J31m\u{1b}[0m");
        let value = serde_json::json!({"name": evil, "face": "\u{1f600}\u{e0041}"});
        let json = escaped(&value.to_string());
        assert!(json.chars().all(is_plain), "{json}");
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&json).unwrap(),
            value
        );
    }

    #[test]
    fn a_log_record_is_always_one_line() {
        let mut log = Sanitized(Vec::new());
        log.write_all(b" WARN peer=kim\x1b[2J\n ERROR all is lost\xff\n")
            .unwrap();
        let line = " WARN peer=kim\\u{1b}[2J\\n ERROR all is lost\u{fffd}\n";
        assert_eq!(String::from_utf8(log.0).unwrap(), line);
    }

    #[test]
    fn a_table_aligns_text_left_and_numbers_right() {
        let rows = vec![
            vec!["a".into(), "1.5".into()],
            vec!["long".into(), "10.25".into()],
        ];
        assert_eq!(
            table("name|ms", &rows),
            "  name     ms\n  a       1.5\n  long  10.25\n"
        );
    }
}
