//! Grammar of a turn in which tools may be called, or reasoning stands before a grammar. Pure.
//!
//! Free text is a part of the grammar, and ends where a mark begins. So the tokens that may come
//! next are known at each byte, also if one token has the end of a mark and what follows it.

use std::fmt::Write as _;

use super::arguments::ArgumentGrammar;
use super::format::{CallFormat, TurnFormat};
use super::lark::{SPACE, contains, escape, sequence, text, without};
use super::tool::Tools;
use crate::grammar::{Grammar, Part};

/// Reasoning at the beginning of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)]
pub enum Thought {
    /// The model does not reason.
    None,
    /// The model may begin to.
    May,
    /// The prompt has begun it.
    Begun,
}

/// Grammar of a turn; `None` if it may be any text. `answer` is the grammar of the text.
pub fn turn_grammar(
    format: &TurnFormat,
    thought: Thought,
    tools: &Tools,
    answer: Option<Grammar>,
) -> Option<Grammar> {
    let callable = tools.callable();
    let thought = match format.thought {
        Some(marks) => Some((marks, thought)).filter(|(_, thought)| *thought != Thought::None),
        None => None,
    };
    let free = tools.list.is_empty() && answer.is_none();
    if callable.is_empty() && (free || (answer.is_some() && thought.is_none())) {
        return answer;
    }
    let calls = format.calls;
    let mut lark = String::new();
    let first = if thought.is_some() { "thought " } else { "" };
    let body = match (callable.is_empty(), tools.must_call(), &answer) {
        (true, _, Some(_)) => "@text",
        // No call, and no mark of one.
        (true, _, None) => "(TEXT)?",
        (false, true, _) => "(BEGIN calls)",
        (false, false, Some(_)) => "(@text | BEGIN calls)",
        (false, false, None) => "(TEXT | LEAD calls)?",
    };
    // Where the text has a header, no text is without one.
    let body = match (format.header, body) {
        (Some(_), "@text") => "HEADER @text",
        (Some(_), "(TEXT)?") => "HEADER TEXT?",
        (Some(_), "(@text | BEGIN calls)") => "(HEADER @text | BEGIN calls)",
        (Some(_), "(TEXT | LEAD calls)?") => "(HEADER TEXT? | LEAD calls)",
        (_, body) => body,
    };
    let _ = writeln!(lark, "start: {first}{body}");
    if let (Some(header), Some(before)) = (format.header, calls.marks.first()) {
        let _ = writeln!(lark, "HEADER: ({})? {}", text(before), text(header));
    }
    let mut never = vec![contains(calls.marks)];
    if let Some(((begin, end), thought)) = thought {
        let optional = if thought == Thought::May { "?" } else { "" };
        let before = match thought {
            Thought::Begun => String::new(),
            _ => format!("/{SPACE}{}/ ", escape(begin)),
        };
        let _ = writeln!(lark, "thought: THOUGHT{optional}");
        let _ = writeln!(
            lark,
            "THOUGHT: {before}(/(?s:.*)/ & ~{}) {} /[ \\n]{{0,4}}/",
            contains(&[end]),
            text(end)
        );
        never.push(format!("/[ \\n]*{}(?s:.*)/", escape(begin)));
    }
    if !tools.list.is_empty() {
        let mark = match (calls.first_only, calls.marks.first()) {
            (true, Some(before)) => format!("({})? {}", text(before), text(calls.mark)),
            _ => text(calls.mark),
        };
        let _ = writeln!(lark, "BEGIN: /{SPACE}/ {mark}");
        if calls.first_only {
            never.push(format!("/[ \\n]*{}(?s:.*)/", escape(calls.mark)));
            let _ = writeln!(lark, "LEAD: /{SPACE}/ {mark}");
        } else {
            let before = without("/(?s:.*)/", &never);
            let _ = writeln!(lark, "LEAD: ({before}) {mark}");
        }
        let _ = writeln!(lark, "TEXT: {}", without("/(?s:.+)/", &never));
    }
    let mut arguments = ArgumentGrammar::new(&calls.arguments);
    if !callable.is_empty() {
        write_calls(&mut lark, calls, tools, &mut arguments);
        lark += &arguments.lark;
    }
    let mut parts = arguments.parts;
    parts.extend(
        answer
            .filter(|_| body.contains("@text"))
            .map(|grammar| Part {
                name: "text".into(),
                grammar,
            }),
    );
    Some(Grammar::Turn {
        lark,
        parts,
        refused: arguments.refused,
    })
}

/// Rules of the calls behind the first mark.
fn write_calls(
    lark: &mut String,
    calls: &CallFormat,
    tools: &Tools,
    arguments: &mut ArgumentGrammar<'_>,
) {
    let more = match tools.one_call || calls.next.is_empty() {
        true => String::new(),
        false => format!("({} call)*", sequence(calls.next)),
    };
    let (open, close, end) = (
        sequence(calls.open),
        sequence(calls.close),
        sequence(calls.end),
    );
    let _ = writeln!(lark, "calls: {open} call {more} {end}");
    let one = tools.callable().iter().map(|tool| {
        let head = text(&format!("{}{}", tool.name, calls.behind_name));
        format!("{head} {}", arguments.of(tool))
    });
    let one: Vec<String> = one.collect();
    let _ = writeln!(lark, "call: ({}) {close}", one.join(" | "));
}
