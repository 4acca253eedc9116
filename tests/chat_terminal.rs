//! `hearthnet chat` on a terminal, with line editing, pasting, Ctrl-C and Ctrl-D, and in a shell
//! with files and pipes; the questions of `hearthnet up`. Real model, real processes, and a
//! controlling terminal of the process's own.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use hearthnet_bus::NodeKey;
use hearthnet_testkit::TinyLlama;
use parking_lot::{Condvar, Mutex};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

use crate::support::up::Household;
use crate::support::*;

/// Prompt of a chat that is ready for input.
const READY: &str = "Ctrl-D leaves.\n> ";
const ROWS: u16 = 40;
const GREEDY: [&str; 2] = ["--temperature", "0"];

/// Terminal of a given width with the program on it, as its controlling terminal: Ctrl-C reaches
/// the program.
struct Terminal {
    keys: File,
    screen: Arc<(Mutex<Vec<u8>>, Condvar)>,
    reader: Option<JoinHandle<()>>,
    child: Child,
    /// Bytes of the plain screen text that earlier waits have consumed.
    seen: usize,
}

impl Terminal {
    /// A terminal that answers where its cursor is.
    fn start(command: &Command, columns: u16, term: &str) -> Self {
        Self::start_with(command, columns, term, true)
    }

    fn start_with(command: &Command, columns: u16, term: &str, answers: bool) -> Self {
        let (keys, stream) = terminal();
        let size = Winsize {
            ws_row: ROWS,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&keys, size).expect("a size");
        // From util-linux: starts a session with this controlling terminal.
        let mut session = Command::new("setsid");
        wrap(session.arg("--ctty"), command);
        session.env("TERM", term);
        session.stdin(stream()).stdout(stream()).stderr(stream());
        let child = session.spawn().expect("setsid of util-linux starts");
        // Only the program has the terminal open, so that reading ends with it.
        drop(session);
        let screen: Arc<(Mutex<Vec<u8>>, Condvar)> = Arc::default();
        let shown = Arc::clone(&screen);
        let mut output = keys.try_clone().expect("another handle");
        let reader = std::thread::spawn(move || {
            let mut piece = [0; 4096];
            let mut asked = 0;
            while let Ok(count @ 1..) = output.read(&mut piece) {
                let positions = {
                    let mut screen = shown.0.lock();
                    screen.extend(&piece[..count]);
                    positions(&screen)
                };
                shown.1.notify_all();
                for position in positions.iter().skip(asked).filter(|_| answers) {
                    // The last program may have ended.
                    let _ = output.write_all(position.as_bytes());
                }
                asked = positions.len();
            }
        });
        Self {
            keys,
            screen,
            reader: Some(reader),
            child,
            seen: 0,
        }
    }

    /// `hearthnet chat --local ARGS` on 80 columns.
    fn chat(home: &Home, args: &[&str]) -> Self {
        let command = home.hearthnet(&[&["chat", "--local"], args].concat());
        let mut terminal = Self::start(&command, 80, "xterm-256color");
        terminal.wait_for(READY);
        terminal
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("a terminal");
    }

    /// Waits until an answer has been cut by its limit and the prompt is back.
    fn wait_for_answer(&mut self) {
        self.wait_for("[stopped at the limit");
        self.wait_for("> ");
    }

    /// Types a line and Enter.
    fn enter(&mut self, line: &str) {
        self.press(line);
        self.press("\r");
    }

    /// Presses keys, and waits until this text appears.
    fn press_for(&mut self, keys: &str, what: &str) {
        self.press(keys);
        self.wait_for(what);
    }

    /// Enters a line, and waits until this text appears.
    fn enter_for(&mut self, line: &str, what: &str) {
        self.enter(line);
        self.wait_for(what);
    }

    /// Enters a question, and waits for its answer.
    fn ask(&mut self, line: &str) {
        self.enter(line);
        self.wait_for_answer();
    }

    /// Waits until this text appears behind the last one waited for. Returns the text up to it.
    fn wait_for(&mut self, what: &str) -> String {
        let deadline = Instant::now() + TIMEOUT;
        let mut screen = self.screen.0.lock();
        loop {
            let shown = plain(&String::from_utf8_lossy(&screen));
            let new = &shown[self.seen..];
            if let Some(at) = new.find(what) {
                let end = at + what.len();
                self.seen += end;
                return new[..end].to_owned();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{what:?} does not come: {new}");
            self.screen.1.wait_for(&mut screen, left);
        }
    }

    /// Presses Ctrl-D at the prompt. Returns the exit status and every byte of the screen.
    fn leave(mut self) -> (Option<i32>, String) {
        self.press("\u{4}");
        self.end()
    }

    fn end(mut self) -> (Option<i32>, String) {
        let status = self.child.wait().expect("its end");
        if let Some(reader) = self.reader.take() {
            reader.join().expect("a reader");
        }
        let screen = self.screen.0.lock();
        (status.code(), String::from_utf8_lossy(&screen).into_owned())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Answers to all questions for the position of the cursor so far. The program asks at the begin of
/// a line, so the column is always the first one; rows are counted by line feeds.
fn positions(screen: &[u8]) -> Vec<String> {
    let question = b"\x1b[6n";
    let asked = screen.windows(question.len()).enumerate();
    let asked = asked.filter(|(_, bytes)| **bytes == question[..]);
    let row = |at: usize| screen[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
    asked
        .map(|(at, _)| format!("\x1b[{};1R", row(at).min(usize::from(ROWS))))
        .collect()
}

/// Text without escape sequences.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' => {
                // CSI ends with a letter; other sequences have one more character.
                if chars.next() == Some('[') {
                    for c in chars.by_ref() {
                        if c.is_ascii_alphabetic() || c == '~' {
                            break;
                        }
                    }
                }
            }
            '\r' => {}
            c => out.push(c),
        }
    }
    out
}

/// Writes the conversation with `/save`, and waits for the prompt. Returns its messages, of which
/// there must be `count`: role and text.
fn save(home: &Home, terminal: &mut Terminal, count: usize) -> Vec<(String, String)> {
    save_by(home, terminal, count, "\r")
}

/// The same, with the character that this terminal sends for Enter.
fn save_by(
    home: &Home,
    terminal: &mut Terminal,
    count: usize,
    enter: &str,
) -> Vec<(String, String)> {
    let file = home.path().join("talk.json");
    terminal.press(&format!("/save {}", file.display()));
    terminal.press_for(enter, &format!("{count} messages written"));
    terminal.wait_for("> ");
    saved(home)
}

/// Messages of the user.
fn asked(messages: &[(String, String)]) -> Vec<&str> {
    let asked = messages.iter().step_by(2);
    asked.map(|message| message.1.as_str()).collect()
}

fn saved(home: &Home) -> Vec<(String, String)> {
    let file = std::fs::read(home.path().join("talk.json")).expect("the saved conversation");
    let value: Value = serde_json::from_slice(&file).expect("JSON");
    let messages = value["messages"].as_array().expect("messages");
    let field = |message: &Value, name: &str| message[name].as_str().expect("text").to_owned();
    let pairs = messages.iter();
    pairs
        .map(|m| (field(m, "role"), field(m, "content")))
        .collect()
}

#[test]
fn up_asks_three_questions_keeps_the_answers_and_then_asks_no_more() {
    let household = Household::new(512, &[]);
    let file = TinyLlama::default().write(household.home.path());
    let file = file.to_str().expect("UTF-8");
    let start = |more: &[&str]| {
        let up = words("up --no-open --listen 127.0.0.1:0 --http 127.0.0.1:0");
        let command = household.command(&[&up[..], more].concat());
        Terminal::start(&command, 80, "xterm-256color")
    };
    let end = |mut terminal: Terminal| {
        let said = terminal.wait_for("page  ");
        terminal.press("\u{3}");
        assert_eq!(terminal.end().0, Some(0));
        said
    };
    let mut terminal = start(&["--model", file]);
    terminal.wait_for("type a name to found a new one. [Home] ");
    terminal.enter_for("Elm Street", "memory may it use? [50 %] ");
    terminal.enter_for("all", "a number from 1 to 100");
    terminal.wait_for("memory may it use? [50 %] ");
    terminal.enter_for("30", "the others call this machine? [");
    terminal.enter_for("Kim", "founded \"Elm Street\" with this machine, \"Kim\"");
    terminal.wait_for("hearth1");
    end(terminal);
    let config = household
        .home
        .path()
        .join("config/hearthnet/hearthnet.toml");
    let config = std::fs::read_to_string(config).expect("the configuration");
    assert_contains(&config, &["\nname = \"Kim\"\n", "\nmemory_percent = 30\n"]);

    let said = end(start(&[]));
    assert!(!said.contains('?') && said.contains("Kim"), "{said}");
}

#[test]
fn input_typed_during_an_answer_is_not_echoed_and_waits_for_the_prompt() {
    let home = Home::new();
    let args = [&GREEDY[..], &["--max-tokens", "64"]].concat();
    let mut terminal = Terminal::chat(&home, &args);
    terminal.enter_for(
        "Write a very long story about a whale and the sea.",
        "Once upon",
    );
    // Ctrl-U deletes the text typed before it, and nothing else.
    terminal.press("xyzzy\u{15}plugh");
    let answer = terminal.wait_for("[stopped at the limit");
    let typed = answer.contains("xyzzy") || answer.contains("plugh");
    assert!(!typed, "{answer}");
    terminal.wait_for("plugh");
    terminal.press("\u{15}");
    assert_eq!(terminal.leave().0, Some(0));
}

#[test]
fn ctrl_c_stops_only_the_answer_and_keeps_its_text() {
    let home = Home::new();
    let mut terminal = Terminal::chat(&home, &GREEDY);
    terminal.enter_for(
        "Write a very long story about a whale and the sea.",
        "Once upon",
    );
    terminal.press("\u{3}");
    // A surplus Ctrl-C has no effect, also not at the prompt.
    terminal.press_for("\u{3}", "[stopped]");
    terminal.wait_for("> ");
    terminal.press_for("\u{3}", "Ctrl-D leaves");
    let messages = save(&home, &mut terminal, 2);
    terminal.enter("/set max_tokens 5");
    terminal.enter_for("And what is the sea?", "[stopped at the limit of 5 tokens");
    terminal.enter_for("/explain", "seed");
    terminal.wait_for("> ");
    let (status, all) = terminal.leave();
    assert_eq!(status, Some(0), "{all}");
    assert_eq!(messages[1].0, "assistant");
    assert!(
        messages[1].1.split_whitespace().count() >= 2,
        "{messages:?}"
    );
}

#[test]
fn several_lines_that_are_pasted_or_quoted_are_one_message() {
    let home = Home::new();
    let mut terminal = Terminal::chat(&home, &[&GREEDY[..], &["--max-tokens", "4"]].concat());
    terminal.ask("\u{1b}[200~line one\nline two\u{1b}[201~");
    for line in ["\"\"\"", "  indented", "", "last\"\"\""] {
        terminal.enter(line);
    }
    terminal.wait_for_answer();
    // History: recalls the last message (up), moves to its end and adds a word.
    terminal.ask("again and");
    terminal.ask("\u{1b}[A again");
    let messages = save(&home, &mut terminal, 8);
    assert_eq!(terminal.leave().0, Some(0));
    let quoted = "  indented\n\nlast";
    assert_eq!(
        asked(&messages),
        ["line one\nline two", quoted, "again and", "again and again"]
    );
}

#[test]
fn lines_of_a_burst_are_one_message_and_drawn_once() {
    let home = Home::new();
    let mut terminal = Terminal::chat(&home, &[&GREEDY[..], &["--max-tokens", "2"]].concat());
    // Pastes as a terminal without bracketed paste sends them; some send line feeds.
    for burst in [
        "line one\r\r\tline two\rline three\r",
        "one\ntwo\n",
        "Hello.\n",
    ] {
        terminal.press(burst);
        terminal.wait_for_answer();
    }
    // Each command of a burst is one line.
    terminal.press_for("/seed 7\r/seed\r", "seed 7\n");
    terminal.wait_for("> ");
    let expected = ["line one\n\n\tline two\nline three", "one\ntwo", "Hello."];
    assert_eq!(asked(&save(&home, &mut terminal, 6)), expected);
    for line in [
        "word ".repeat(9600),
        "a line of eighty columns\r".repeat(1900),
    ] {
        let before = terminal.screen.0.lock().len();
        terminal.press(&line);
        terminal.press_for("\r", "this model reads at most");
        let written = terminal.screen.0.lock().len() - before;
        assert!(written < 16 * line.len(), "{written} bytes");
        terminal.wait_for("> ");
    }
    // Ctrl-D right behind a message is processed too.
    terminal.press("Hello.\r\u{4}");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn a_terminal_that_does_not_say_where_its_cursor_is_gets_plain_lines() {
    let home = Home::new();
    let args = ["chat", "--local", "--max-tokens", "2"];
    let command = home.hearthnet(&[&args[..], &GREEDY].concat());
    let mut terminal = Terminal::start_with(&command, 80, "xterm-256color", false);
    terminal.wait_for("Ctrl-D leaves.\n");
    // Text typed before the terminal is given up is not lost.
    terminal.press_for("Hel", "warning: lines cannot be edited on this terminal");
    terminal.wait_for("> Hel");
    terminal.press("lo.\n");
    terminal.wait_for_answer();
    terminal.press("line one\nline two\n");
    terminal.wait_for_answer();
    let messages = save_by(&home, &mut terminal, 4, "\n");
    let (status, all) = terminal.leave();
    assert_eq!(status, Some(0));
    assert_eq!(all.matches("warning:").count(), 1, "{all:?}");
    assert_eq!(asked(&messages), ["Hello.", "line one\nline two"]);
}

#[test]
fn commands_are_completed_and_standard_output_gets_only_answers() {
    let home = Home::new();
    let mut terminal = Terminal::chat(&home, &["--max-tokens", "2"]);
    terminal.press("/he");
    terminal.press_for("\t", "/help");
    terminal.press_for("\r", "show this list");
    terminal.wait_for("> ");
    assert_eq!(terminal.leave().0, Some(0));
    let answers = home.path().join("answers");
    let chat = home.hearthnet(&["chat", "--local", "--max-tokens", "2"]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "out=$1; shift; exec \"$@\" > \"$out\"", "sh"]);
    wrap(shell.arg(&answers), &chat);
    let mut terminal = Terminal::start(&shell, 80, "xterm-256color");
    terminal.wait_for(READY);
    terminal.ask("Hello.");
    assert_eq!(terminal.leave().0, Some(0));
    let answers = std::fs::read_to_string(answers).expect("the answers");
    assert!(
        !answers.trim().is_empty() && !answers.contains('\u{1b}'),
        "{answers:?}"
    );
}

#[test]
fn a_message_that_is_too_long_is_left_out_and_the_chat_goes_on() {
    let home = Home::new();
    let mut terminal = Terminal::chat(&home, &[&GREEDY[..], &["--max-tokens", "4"]].concat());
    terminal.ask("Name a colour.");
    terminal.enter(&format!("\u{1b}[200~{}\u{1b}[201~", "word ".repeat(9000)));
    terminal.wait_for("this model reads at most");
    terminal.ask("Name another one.");
    save(&home, &mut terminal, 4);
    assert_eq!(terminal.leave().0, Some(0));
}

#[test]
fn slash_commands_change_the_system_prompt_and_the_sampling() {
    let home = Home::new();
    let mut terminal = Terminal::chat(&home, &["--max-tokens", "6"]);
    terminal.enter_for("/help", "/system");
    terminal.enter_for("/nonsense", "there is no command /nonsense");
    terminal.enter_for("/set top_p 2", "it must be from 0 to 1");
    terminal.enter("/seed 7");
    terminal.enter_for("/system Be brief.", "set");
    terminal.ask("Hello.");
    terminal.enter_for("/explain", "seed 7");
    let file = home.path().join("talk.json");
    terminal.enter_for(&format!("/save {}", file.display()), "3 messages written");
    terminal.enter_for("/reset", "conversation cleared");
    terminal.enter_for(&format!("/load {}", file.display()), "3 messages read");
    terminal.enter_for("/model /nowhere/else.gguf", "error:");
    // The earlier conversation still answers.
    terminal.ask("Hello again.");
    terminal.enter("/exit");
    assert_eq!(terminal.end().0, Some(0));
    let messages = saved(&home);
    assert_eq!(messages[0], ("system".to_owned(), "Be brief.".to_owned()));
    // By default no history is stored.
    assert!(!home.path().join("data/chat_history").exists());
}

#[test]
fn history_is_stored_only_on_request_and_only_for_its_owner() {
    let home = Home::new();
    home.node_id();
    let args = ["--set", "chat.history=true", "--max-tokens", "2"];
    let mut terminal = Terminal::chat(&home, &args);
    terminal.ask("Remember the harbour.");
    assert_eq!(terminal.leave().0, Some(0));
    let file = home.path().join("data/chat_history");
    assert_eq!(mode(&file), 0o600);
    let mut terminal = Terminal::chat(&home, &args);
    terminal.press_for("\u{1b}[A", "Remember the harbour.");
    terminal.press_for("\u{3}", "Ctrl-D leaves");
    terminal.wait_for("> ");
    assert_eq!(terminal.leave().0, Some(0));
}

#[test]
fn an_answer_is_wrapped_at_words_and_has_the_same_text_as_in_a_pipe() {
    let home = Home::new();
    let question = ["chat", "--local", "Why is it good to share?", "--seed", "3"];
    let ask = [&question[..], &["--max-tokens", "120"]].concat();
    let piped = home.run(&ask);
    assert!(piped.status.success());
    let piped = text(&piped.stdout);
    assert!(!piped.contains('\u{1b}'));
    for columns in [40, 80, 120] {
        let terminal = Terminal::start(&home.hearthnet(&ask), columns, "xterm-256color");
        let (status, all) = terminal.end();
        assert_eq!(status, Some(0), "{all}");
        let shown = plain(&all);
        // The spinner comes before the answer, the notes come after it.
        let begin: Vec<&str> = piped.split_whitespace().take(3).collect();
        let begin = shown.rfind(&begin.join(" "));
        let answer = &shown[begin.expect("the answer begins on one line")..];
        let answer = answer.split("\n[stopped").next().unwrap_or(answer);
        for line in answer.lines() {
            assert!(line.chars().count() <= usize::from(columns), "{line:?}");
        }
        let words =
            |text: &str| -> Vec<String> { text.split_whitespace().map(str::to_owned).collect() };
        assert_eq!(words(answer), words(&piped), "{columns} columns");
        if columns == 40 {
            assert!(answer.lines().count() > piped.lines().count());
        }
    }
}

/// Conversation on a dumb terminal.
fn dumb_chat(home: &Home) -> Terminal {
    let args = ["chat", "--local", "--max-tokens", "2"];
    let command = home.hearthnet(&[&args[..], &GREEDY].concat());
    let mut terminal = Terminal::start(&command, 120, "dumb");
    terminal.wait_for(READY);
    terminal
}

#[test]
fn a_line_cut_by_the_terminal_is_reported_and_not_sent() {
    let home = Home::new();
    let mut terminal = dumb_chat(&home);
    terminal.press(&format!("{}\n", "international ".repeat(360)));
    terminal.wait_for("this line was not sent: the terminal passes on 4095 bytes");
    terminal.wait_for("> ");
    terminal.press(&format!("{}\n", "international ".repeat(285)));
    terminal.wait_for_answer();
    terminal.press("\"\"\"\n");
    terminal.press(&format!("{}\n", "b".repeat(5000)));
    terminal.press_for("\"\"\"\n", "this line was not sent");
    terminal.wait_for("> ");
    let messages = save_by(&home, &mut terminal, 2, "\n");
    assert_eq!(terminal.leave().0, Some(0));
    assert_eq!(messages[0].1.len(), 3989);
}

#[test]
fn lines_that_come_together_are_one_message_also_without_bracketed_paste() {
    let home = Home::new();
    let mut terminal = dumb_chat(&home);
    terminal.press("line one\n\nline two\nline three\n");
    terminal.wait_for_answer();
    let messages = save_by(&home, &mut terminal, 2, "\n");
    // Ctrl-D right behind a message is processed too.
    terminal.press("Hello.\n\u{4}");
    let (status, all) = terminal.end();
    assert_eq!(status, Some(0));
    assert!(!all.contains('\u{1b}'), "{all:?}");
    assert_eq!(messages[0].1, "line one\n\nline two\nline three");
}

#[test]
fn notes_and_errors_are_broken_between_words_on_a_narrow_terminal() {
    let home = Home::new();
    let nowhere = ["chat", "Hello.", "--local", "--model", "no-such"];
    for command in [&nowhere[..], &["status"], &["chat", "Hello.", "--raw"]] {
        let wide = home.run(command);
        let said = text(&wide.stderr);
        let words: Vec<&str> = said.split_whitespace().collect();
        let (status, all) = Terminal::start(&home.hearthnet(command), 20, "dumb").end();
        assert_eq!(status, wide.status.code());
        assert_ne!(status, Some(0));
        let shown = plain(&all);
        assert_eq!(shown.split_whitespace().collect::<Vec<_>>(), words);
        for line in shown.lines() {
            // The terminal itself breaks only words that are longer than a line.
            let mut from = 0;
            for word in line.split(' ') {
                let to = from + word.chars().count();
                let whole = to - from > 20 || to == from || from / 20 == (to - 1) / 20;
                assert!(whole, "{word:?} in {line:?}");
                from = to + 1;
            }
        }
    }
}

#[test]
fn a_dumb_terminal_gets_only_text() {
    let home = Home::new();
    // Every sampled answer is longer than this limit.
    let ask = || home.hearthnet(&["chat", "--local", "Hello.", "--max-tokens", "2"]);
    for term in ["dumb", ""] {
        let (status, all) = Terminal::start(&ask(), 80, term).end();
        assert_eq!(status, Some(0));
        assert!(!all.contains('\u{1b}'), "{all:?}");
        assert!(all.contains("[stopped at the limit of 2 tokens"), "{all:?}");
    }
    // A terminal gets colours unless NO_COLOR is set.
    for (no_color, coloured) in [("", true), ("1", false)] {
        let mut command = ask();
        command.env("NO_COLOR", no_color);
        let (status, all) = Terminal::start(&command, 80, "xterm-256color").end();
        assert_eq!(status, Some(0));
        assert_eq!(all.contains("\u{1b}[2m[stopped"), coloured, "{all:?}");
    }
}

#[test]
fn control_characters_in_an_answer_reach_no_terminal() {
    let home = Home::new();
    // Its tokens are single bytes, and at this temperature it emits any of them, as a hostile host
    // could.
    let model = TinyLlama::default().write(home.path());
    let model = model.to_str().expect("a UTF-8 path");
    let (mut escapes, mut others) = (0, 0);
    for seed in ["1", "2", "3", "4", "5", "6"] {
        let ask = [
            "chat", "--local", "Hello.", "--model", model, "--seed", seed,
        ];
        let ask = [&ask[..], &["--temperature", "2", "--max-tokens", "150"]].concat();
        // A pipe gets the unfiltered answer.
        let piped = home.run(&ask);
        assert!(piped.status.success(), "{}", text(&piped.stderr));
        escapes += piped.stdout.iter().filter(|byte| **byte == 0x1b).count();
        let is_control = |byte: &&u8| byte.is_ascii_control() && !b"\n\t".contains(byte);
        others += piped.stdout.iter().filter(is_control).count();
        let (status, all) = Terminal::start(&home.hearthnet(&ask), 80, "dumb").end();
        assert_eq!(status, Some(0), "{all:?}");
        // The terminal driver turns line feeds into CRLF.
        let shown = all.replace("\r\n", "\n");
        let foreign = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
        assert!(!shown.contains(foreign), "{shown:?}");
    }
    assert!(
        escapes > 0 && others > escapes,
        "it tried {escapes} and {others}"
    );
}

#[test]
fn standard_input_is_one_message_and_belongs_to_the_question() {
    let home = Home::new();
    let ask = |args: &[&str], input: Option<&str>| -> Value {
        let args = [
            &["chat", "--local", "--json", "--max-tokens", "3"],
            args,
            &GREEDY,
        ]
        .concat();
        let output = match input {
            Some(input) => home.run_with(&args, input),
            None => home.run(&args),
        };
        let mut value = json_output(&output);
        value["usage"]["prompt_tokens"].take()
    };
    let file = home.path().join("letter.txt");
    std::fs::write(&file, "Dear Ana,\n\nthe harbour froze.\n").expect("a file");
    let file = file.to_str().expect("a UTF-8 path");
    let letter = "Dear Ana,\n\nthe harbour froze.";
    let whole = ask(&[&format!("Summarise\n\n{letter}")], None);
    assert_eq!(ask(&["Summarise"], Some(&format!("{letter}\n"))), whole);
    assert_eq!(ask(&["Summarise", file], None), whole);
    assert_eq!(ask(&[], Some(&format!("{letter}\n"))), ask(&[letter], None));
    assert_eq!(ask(&[file], None), ask(&[letter], None));
    // `--lines`: each line is a message of the same conversation, with two answers.
    let talk = ["chat", "--local", "--json", "--lines", "--max-tokens", "3"];
    let output = home.run_with(&talk, "Hello.\nAnd you?\n");
    assert_eq!(text(&output.stdout).lines().count(), 2);
}

#[test]
fn ctrl_c_while_connecting_ends_at_once_with_its_own_status() {
    let home = Home::new();
    // A server that accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let host = format!(
        "{}#{}",
        silent.local_addr().expect("an address"),
        NodeKey::generate().expect("a key").id()
    );
    let enable = ["--set", "policy.research.enable=true"];
    let ask = ["chat", "Hello.", "--no-fallback", "--shard", &host];
    let child = home.spawn(&[&enable[..], &ask].concat());
    let (_connection, _) = silent.accept().expect("a caller");
    interrupt(&child);
    let output = child.wait_with_output().expect("its end");
    assert_eq!(output.status.code(), Some(130));
    let said = text(&output.stderr);
    assert!(
        said.contains("error: cancelled") && !said.contains("panicked"),
        "{said}"
    );
}

#[test]
fn sampling_that_cannot_be_is_refused_before_any_host_is_started() {
    let home = Home::new();
    for wrong in [["--top-p", "2"], ["--max-tokens", "0"]] {
        for command in [&["demo", "Hello."][..], &["chat", "Hello.", "--local"]] {
            let output = home.run(&[command, &wrong].concat());
            assert_eq!(output.status.code(), Some(3));
            let said = text(&output.stderr);
            // The error is the first line that is printed.
            assert!(said.starts_with("error: `"), "{said}");
        }
    }
    let output = home.run(&["demo", "--shards", "2", "--cuts", "7,20"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("leave one of them out"));
}
