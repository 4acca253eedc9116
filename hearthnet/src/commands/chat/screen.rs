//! Output of an answer: sanitized and wrapped on a terminal, byte for byte elsewhere. Notices go to
//! standard error, never inside a word.

use std::io::{IsTerminal as _, Write as _};

use hearthnet_orchestrator::chat::Frame;
use hearthnet_platform::terminal::is_same_file;
use hearthnet_transport::Code;

use crate::cli::wrap::Wrap;
use crate::cli::{Failure, Spinner, TerminalStyle, columns, note, print, print_bytes};

pub(super) struct Screen {
    style: TerminalStyle,
    /// `None` unless standard output is a terminal.
    wrap: Option<Wrap>,
    spinner: Option<Spinner>,
    /// Notices to print at the end of the current word, if output is not wrapped.
    later: Vec<String>,
    in_word: bool,
    /// Standard output and error are the same file, so that a notice could split a word.
    mixed: bool,
    begun: bool,
}

impl Screen {
    pub(super) fn new(style: TerminalStyle) -> Self {
        Self {
            style,
            wrap: std::io::stdout().is_terminal().then(Wrap::default),
            spinner: None,
            later: Vec::new(),
            in_word: false,
            mixed: is_same_file(std::io::stdout(), std::io::stderr()),
            begun: false,
        }
    }

    /// Shows progress until the answer begins.
    pub(super) fn status(&mut self, what: &str) {
        if self.begun {
            return;
        }
        match &self.spinner {
            Some(spinner) => spinner.say(what),
            None => self.spinner = Some(Spinner::new(&self.style, what)),
        }
    }

    pub(super) fn text(&mut self, text: &str) -> Result<(), Failure> {
        if text.is_empty() {
            return Ok(());
        }
        self.spinner = None;
        self.begun = true;
        if let Some(wrap) = &mut self.wrap {
            let shown = wrap.push(text, columns(std::io::stdout()));
            return print(shown);
        }
        // Print pending notices at the first end of a word.
        let end = text
            .find(char::is_whitespace)
            .filter(|_| !self.later.is_empty());
        let (before, after) = text.split_at(end.unwrap_or(text.len()));
        print_bytes(before)?;
        if end.is_some() {
            self.later.drain(..).for_each(note);
            print_bytes(after)?;
        }
        self.in_word = !text.ends_with(char::is_whitespace);
        Ok(())
    }

    /// Prints one notice on its own line.
    pub(super) fn notice(&mut self, line: &str) -> Result<(), Failure> {
        self.spinner = None;
        if let Some(wrap) = &mut self.wrap {
            if !wrap.at_start() {
                print("\n")?;
            }
            wrap.interrupted();
        } else if self.in_word && self.mixed {
            self.later.push(line.to_owned());
            return Ok(());
        }
        note(self.style.dim(line));
        Ok(())
    }

    /// Ends the answer, complete or not: prints the last word and ends its line.
    pub(super) fn end(&mut self) -> Result<(), Failure> {
        self.spinner = None;
        if let Some(wrap) = &mut self.wrap {
            let rest = wrap.finish(columns(std::io::stdout()));
            print(rest)?;
            if self.begun {
                print("\n")?;
            }
        }
        self.in_word = false;
        self.later.drain(..).for_each(note);
        Ok(())
    }

    /// Prints the parts of a frame that concern the user; `name` returns the name of a host.
    pub(super) fn frame(
        &mut self,
        frame: &Frame,
        name: &dyn Fn(&str) -> String,
    ) -> Result<(), Failure> {
        match frame {
            Frame::TokenDelta {
                text, reasoning, ..
            } if text.is_empty() && !reasoning.is_empty() => self.status("thinking"),
            Frame::TokenDelta { text, .. } => return self.text(text),
            Frame::PromptProgress { done, total } => {
                let percent = u64::from(*done) * 100 / u64::from(*total).max(1);
                self.status(&format!("prompt {percent}%"));
            }
            Frame::ShardStatus {
                shard_id,
                status,
                code,
                ..
            } => match &**status {
                "ready" => self.status("reading the prompt"),
                "waiting" => return self.notice(&waiting(shard_id, code.as_ref())),
                "degraded" => self.status("waiting for another host"),
                _ => {}
            },
            Frame::ShardFailover { .. } => {
                if let Some(line) = moved(frame, name) {
                    return self.notice(&line);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Notice that the host of `shard_id` is slow.
fn waiting(shard_id: &str, code: Option<&Code>) -> String {
    let layers = shard_id.rsplit_once(':').map_or("?", |(_, layers)| layers);
    let why = match code {
        Some(code) if *code == Code::SILENT => {
            "does not answer; another host takes over if there is one"
        }
        _ => "is still at work",
    };
    format!("waiting: the host of layers {layers} {why}")
}

/// Notice that layers moved from one host to others.
fn moved(frame: &Frame, name: &dyn Fn(&str) -> String) -> Option<String> {
    let Frame::ShardFailover {
        host,
        code,
        replacements,
        arithmetic,
        ..
    } = frame
    else {
        return None;
    };
    let changed = match arithmetic {
        Some((before, now)) => format!(", with {now} instead of {before}"),
        None => String::new(),
    };
    let Some(host) = host else {
        return Some(format!(
            "no host is available: this machine answers alone{changed}"
        ));
    };
    let who = match code {
        code if *code == Code::LEAVING => format!("{} is leaving", name(host)),
        code if *code == Code::CONVICTED => format!(
            "{} was found to compute wrong answers, so the text so far may be wrong",
            name(host)
        ),
        _ => format!("{} dropped out", name(host)),
    };
    let to: Vec<String> = replacements.iter().map(|host| name(host)).collect();
    Some(match to.as_slice() {
        [] => format!("[{who}; this machine takes over{changed}]"),
        [one] => format!("[{who}; {one} takes over{changed}]"),
        several => format!("[{who}; {} take over{changed}]", several.join(" and ")),
    })
}

/// Removes what a spinner has left on the terminal's last line.
pub(super) fn clear_line(style: &TerminalStyle) {
    if style.moves {
        let _ = write!(std::io::stderr(), "\r\u{1b}[K");
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_orchestrator::exact::Arithmetics;

    use super::*;

    fn failover(host: Option<&str>, code: &'static str, to: &[&str]) -> Frame {
        Frame::ShardFailover {
            shard_id: "m:0-1".into(),
            host: host.map(str::to_owned),
            code: code.into(),
            replacements: to.iter().map(|&to| to.to_owned()).collect(),
            replayed: 5,
            recovery_ms: 1.0,
            arithmetic: None,
        }
    }

    #[test]
    fn a_host_that_drops_is_one_plain_line() {
        let name = |host: &str| host.to_uppercase();
        for (frame, line) in [
            (
                failover(Some("ana"), "connection_lost", &["lee"]),
                "[ANA dropped out; LEE takes over]",
            ),
            (
                failover(Some("ana"), "leaving", &["lee", "kim"]),
                "[ANA is leaving; LEE and KIM take over]",
            ),
            (
                failover(Some("ana"), "convicted", &["lee"]),
                "[ANA was found to compute wrong answers, so the text so far may be wrong; \
                 LEE takes over]",
            ),
            (
                failover(None, "pipeline_stalled", &[]),
                "no host is available: this machine answers alone",
            ),
        ] {
            assert_eq!(moved(&frame, &name).as_deref(), Some(line));
        }
        let mut frame = failover(Some("ana"), "connection_lost", &["lee"]);
        if let Frame::ShardFailover { arithmetic, .. } = &mut frame {
            let of = |name: &str| Arithmetics::from_iter([name.to_owned()]);
            *arithmetic = Some((of("canonical-1"), of("torch-cpu-fp32")));
        }
        assert_eq!(
            moved(&frame, &name).as_deref(),
            Some("[ANA dropped out; LEE takes over, with torch-cpu-fp32 instead of canonical-1]")
        );
    }
}
