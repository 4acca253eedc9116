//! Attacks by group, name or number, and what the suite says about them.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde::Serialize;

use crate::attack::Entry;
use crate::attacks::ATTACKS;
use crate::case::Case;
use crate::{HarnessError, Result};

/// Every attack, by the number of its case.
pub(crate) fn all() -> Vec<&'static Entry> {
    let mut all: Vec<&Entry> = ATTACKS.iter().collect();
    all.sort_by_key(|entry| entry.case);
    all
}

/// Attacks of these groups, names or numbers; every attack if there are none.
///
/// # Errors
/// [`HarnessError::Usage`] if one of them names no attack.
pub fn select(wanted: &[String]) -> Result<Vec<&'static Entry>> {
    let all = all();
    let is = |entry: &Entry, wanted: &str| {
        let of_entry = [entry.name, entry.group(), &entry.case.to_string()].map(plain);
        of_entry.contains(&plain(wanted))
    };
    for one in wanted {
        if !all.iter().any(|entry| is(entry, one)) {
            return Err(unknown(one, &all));
        }
    }
    let chosen = |entry: &&Entry| wanted.is_empty() || wanted.iter().any(|one| is(entry, one));
    Ok(all.into_iter().filter(chosen).collect())
}

/// A name for comparisons: `-`, `_` and spaces are the same.
fn plain(name: &str) -> String {
    name.to_lowercase().replace(['_', '-'], " ")
}

fn unknown(wanted: &str, all: &[&Entry]) -> HarnessError {
    let part = plain(wanted);
    let alike = all.iter().flat_map(|entry| [entry.group(), entry.name]);
    let alike: BTreeSet<&str> = alike.filter(|name| plain(name).contains(&part)).collect();
    let alike = match alike.is_empty() {
        true => String::new(),
        false => format!("; alike: {}", Vec::from_iter(alike).join(", ")),
    };
    HarnessError::usage(format!(
        "no group, name or number of an attack is `{wanted}`{alike}; `hearthnet adversarial list` \
         shows all"
    ))
}

/// Attack for a program that reads the list.
#[derive(Debug, Serialize)]
pub struct Listed {
    case: u8,
    group: &'static str,
    name: &'static str,
    attack: &'static str,
    code: &'static str,
}

/// Every attack, for a program.
pub fn listed() -> Vec<Listed> {
    let listed = |entry: &Entry| Listed {
        case: entry.case,
        group: entry.group(),
        name: entry.name,
        attack: action(entry),
        code: entry.code(),
    };
    all().into_iter().map(listed).collect()
}

/// Every attack, for people: a heading for each group, and a line for each attack.
pub fn list() -> String {
    let (mut text, mut group) = (String::new(), "");
    for entry in all() {
        if entry.group() != group {
            group = entry.group();
            let _ = writeln!(text, "{}{group}", if text.is_empty() { "" } else { "\n" });
        }
        let _ = writeln!(text, "{:>4}  {}", entry.case, entry.name);
    }
    text
}

fn action(entry: &Entry) -> &'static str {
    Case::find(entry.case).map_or("", |case| case.attack)
}

/// Explains what an attack does, why it matters, and under which conditions it runs.
pub fn explain(entry: &Entry) -> String {
    let Entry {
        name, case, budget, ..
    } = entry;
    let host = match (entry.scene.community, entry.scene.kv_pages) {
        (true, _) => "a node of a community, which serves layers",
        (false, Some(_)) => "a host outside of any community, with little memory for KV",
        (false, None) => "a host outside of any community",
    };
    let repeated = match entry.repeats {
        true => "until enough steps of the honest caller were measured beside it",
        false => "no: it changes the host for good or for a while",
    };
    let (text, kib, why) = (header(entry), budget.bytes >> 10, budget.why);
    format!(
        "{name}\n\n\
         case        {case}, {group}: {action}\n\
         must raise  {code}\n\
         host        {host}\n\
         memory      at most {kib} KiB of growth: {why}; and a page of KV for each stream\n\
         repeated    {repeated}\n\n\
         {text}\n\
         hearthnet adversarial run --only {name}\n\
         hearthnet adversarial explain --source {name}\n",
        group = entry.group(),
        action = action(entry),
        code = entry.code(),
    )
}

/// Comment at the head of an attack's file, or before its function in a file with several.
fn header(entry: &Entry) -> String {
    let function = format!("pub(super) fn {}(", entry.name);
    let lines: Vec<&str> = entry.source.lines().collect();
    let (mark, end) = match lines.iter().position(|line| line.starts_with(&function)) {
        Some(at) => ("///", at),
        None => {
            let comment = |line: &&str| line.starts_with("//!");
            ("//!", lines.iter().take_while(|line| comment(line)).count())
        }
    };
    let comment = lines.iter().take(end).rev();
    let comment = comment.map_while(|line| line.strip_prefix(mark));
    let mut comment: Vec<&str> = comment
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        .collect();
    comment.reverse();
    comment.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(wanted: &[&str]) -> Vec<&'static str> {
        let wanted: Vec<String> = wanted.iter().map(|one| (*one).to_owned()).collect();
        let chosen = select(&wanted).unwrap();
        chosen.iter().map(|entry| entry.name).collect()
    }

    #[test]
    fn attacks_are_selected_by_number_name_and_group() {
        assert_eq!(names(&[]).len(), ATTACKS.len());
        let nan = "rows_that_are_not_finite_are_refused";
        assert_eq!(names(&["33"]), [nan]);
        assert_eq!(names(&[nan, "33"]), [nan]);
        assert_eq!(names(&["rows that are not finite are refused"]), [nan]);
        let framing = names(&["Framing"]);
        assert_eq!(framing.len(), 7);
        assert_eq!(names(&["33", "framing"]).len(), 8);
        assert_eq!(names(&["flow-control"]).len(), 7);
    }

    #[test]
    fn a_name_that_does_not_exist_is_answered_with_what_is_alike() {
        for wanted in ["0", "template", "fram", "a_fork"] {
            let error = select(&[wanted.to_owned()]).unwrap_err().to_string();
            assert!(error.contains("adversarial list"), "{error}");
        }
        let error = select(&["fork".to_owned()]).unwrap_err().to_string();
        assert!(
            error.contains("a_fork_freezes_its_author_everywhere"),
            "{error}"
        );
    }

    #[test]
    fn every_attack_is_listed_and_explains_itself() {
        let list = list();
        for entry in all() {
            assert!(list.contains(entry.name));
            let text = header(entry);
            assert!(
                text.len() > 60 && !text.contains("//"),
                "{}: {text}",
                entry.name
            );
            assert!(explain(entry).contains(&text));
        }
        assert!(list.starts_with("framing\n   1  payload_length"));
        assert_eq!(listed().len(), ATTACKS.len());
    }
}
