//! `specs/error-codes.md` lists every error code with the crates that raise it, the test that raises
//! it, what its receiver does, and the test that asserts that. The codes and crates are read from the
//! sources; the other columns are written by hand, and the tests are checked here.
//!
//! `UPDATE=1 cargo test -p hearthnet-testkit --test error_codes` writes the table anew; a new code gets
//! empty cells.
//!
//! `tests/codes` runs each test of the table with coverage, and then the ignored test here, which finds
//! the line of the product that raises the code among those that ran.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use hearthnet_transport::{CloseCode, is_name};

/// Names that `Code` carries but that are no errors: an answer that succeeded, and the regular ends of
/// a stream in the flight record.
const NO_ERRORS: [&str; 3] = ["ok", "closed", "session_ended"];

/// Calls with a code: their text, the number of the argument, and the end of the files' paths.
const CALLS: [(&str, usize, &str); 5] = [
    ("Code::new(", 0, ".rs"),
    ("ApiError::new(", 1, ".rs"),
    (".code(", 0, ".rs"),
    ("forbidden(", 0, "page/changes.rs"),
    ("bad(", 1, "page/changes.rs"),
];

/// Arguments of the first two calls that are no literals. Their codes are found elsewhere: in a function
/// of [`TABLES`], in an enum of `strum`, or in the calls of a function.
const NO_LITERALS: [&str; 7] = [
    "match self {",
    "self.into()",
    "other.into()",
    "self.facts().0",
    "kind.facts().1",
    "code",
    "THREAD_UNSUPPORTED",
];

/// Functions whose `match` maps variants to codes.
const TABLES: [&str; 2] = ["fn facts(", "fn code("];

/// Functions in which each literal that is spelled like a code is one, and the ends of their files'
/// paths.
const LITERALS: [(&str, &str); 2] = [
    ("fn admit(", "hearthnet-http/src/auth.rs"),
    ("fn tls_cause(", "hearthnet-transport/src/net/metrics.rs"),
];

/// Beginning of a module of tests.
const TESTS: &str = "\n#[cfg(test)]\nmod tests {";

/// Where a code is defined and by which texts sources name it.
#[derive(Default)]
struct Found {
    /// `"code"`, `Code::CODE`, `CloseCode::Code`, and variants of errors with this code.
    names: BTreeSet<String>,
    /// Crates with a literal or a variant of it.
    crates: BTreeSet<String>,
}

type Codes = BTreeMap<String, Found>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All Rust files of the repository, by path.
fn sources() -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                if !name.starts_with('.') && name != "target" && name != "node_modules" {
                    folders.push(path);
                }
            } else if name.ends_with(".rs") {
                let text = fs::read_to_string(&path).unwrap();
                let path = path.strip_prefix(root()).unwrap();
                files.insert(path.to_str().unwrap().replace('\\', "/"), text);
            }
        }
    }
    files
}

/// Crate of a production source; `None` for tests, and for crates of tests.
fn crate_of(path: &str) -> Option<&str> {
    let (folder, file) = path.split_once("/src/")?;
    let name = folder.rsplit('/').next()?;
    let of_tests = [
        "adversarial",
        "hearthnet-testkit",
        "hearthnet-conformance",
        "hearthnet-sim",
    ];
    let is_test = file.contains("tests/")
        || file.ends_with("tests.rs")
        || ["fake.rs", "fuzzing.rs", "testing.rs"]
            .iter()
            .any(|end| file.ends_with(end));
    (!is_test && !of_tests.contains(&name)).then_some(name)
}

/// A production source without comments and without its module of tests.
fn production(text: &str) -> String {
    let text = text.split_once(TESTS).map_or(text, |(before, _)| before);
    let lines = text.lines().map(|line| match line.find("//") {
        Some(at) if at == 0 || line[..at].ends_with(' ') => &line[..at],
        _ => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Literals of a text that are spelled like codes.
fn literals(text: &str) -> impl Iterator<Item = &str> {
    text.split('"').skip(1).step_by(2).filter(|it| is_name(it))
}

/// The text up to the bracket that closes one opened before it, split at its outermost commas.
fn arguments(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut quoted, mut found) = (0, 0, false, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            _ if quoted => {}
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth == 0 => {
                found.push(text[start..at].trim());
                break;
            }
            ')' | ']' | '}' => depth -= 1,
            ',' | ';' if depth == 0 => {
                found.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    found
}

/// Name in the last `impl` before a place.
fn implemented(text: &str, at: usize) -> &str {
    let (_, after) = text[..at].rsplit_once("\nimpl ").unwrap_or_default();
    let line = after.lines().next().unwrap_or_default();
    let name = line.split(" for ").last().unwrap_or_default();
    name.split(['<', ' ']).next().unwrap_or_default()
}

/// Body of a function that begins at a place, up to the brace at its indentation.
fn body(text: &str, at: usize) -> &str {
    let line = text[..at].rfind('\n').map_or(0, |end| end + 1);
    let indent = text[line..].len() - text[line..].trim_start().len();
    let end = format!("\n{}}}", " ".repeat(indent));
    let rest = &text[at..];
    rest.split_once(&end).map_or(rest, |(body, _)| body)
}

/// Codes of `match` arms, with the variants that stand before each.
fn arms<'a>(body: &'a str, own: &str) -> Vec<(&'a str, Vec<String>)> {
    let (mut found, mut variants, mut open) = (Vec::new(), Vec::new(), false);
    for line in body.lines().map(str::trim) {
        let (pattern, value) = line.split_once("=>").unwrap_or(match open {
            true => ("", line),
            false => (line, ""),
        });
        let names: Vec<String> = pattern
            .split(|c: char| !c.is_alphanumeric() && c != ':' && c != '_')
            .filter_map(|word| word.split_once("::"))
            .map(|(of, variant)| match of {
                "Self" => format!("{own}::{variant}"),
                of => format!("{of}::{variant}"),
            })
            .collect();
        if !names.is_empty() && (open || !line.starts_with('|')) {
            variants.clear();
            open = false;
        }
        variants.extend(names);
        open |= line.contains("=>");
        if open && let Some(code) = literals(value).next() {
            found.push((code, std::mem::take(&mut variants)));
            open = false;
        }
        if value.trim_start().starts_with("return") || value.contains(".code()") {
            variants.clear();
        }
    }
    found
}

/// Variants of an enum whose code is their name in snake case, or the one in `serialize`.
fn variants(text: &str, name: &str) -> Vec<(String, String)> {
    let (_, rest) = text.split_once(&format!("enum {name} {{\n")).expect(name);
    let rest = rest.split("\n}").next().unwrap();
    let (mut given, mut found) = (None, Vec::new());
    for line in rest.lines() {
        if let Some((_, code)) = line.split_once("strum(serialize = \"") {
            given = code.split('"').next().map(str::to_owned);
        }
        let variant = line.strip_prefix("    ").unwrap_or_default();
        if variant.starts_with(|c: char| c.is_ascii_uppercase()) {
            let variant = variant
                .split(|c: char| !c.is_alphanumeric())
                .next()
                .unwrap();
            let mut snake = String::new();
            for c in variant.chars() {
                if c.is_ascii_uppercase() && !snake.is_empty() {
                    snake.push('_');
                }
                snake.push(c.to_ascii_lowercase());
            }
            found.push((given.take().unwrap_or(snake), format!("{name}::{variant}")));
        }
    }
    found
}

/// Codes in one production source.
fn scan(path: &str, text: &str, codes: &mut Codes) {
    let own = crate_of(path).unwrap();
    let mut add = |code: &str, names: Vec<String>| {
        if is_name(code) && !NO_ERRORS.contains(&code) {
            let found = codes.entry(code.to_owned()).or_default();
            found.crates.insert(own.to_owned());
            found.names.extend(names);
        }
    };
    for (number, (call, index, file)) in CALLS.into_iter().enumerate() {
        let calls = text.match_indices(call);
        let calls = calls.filter(|(at, _)| path.ends_with(file) && !text[..*at].ends_with("Qr"));
        for (at, _) in calls {
            let given = arguments(&text[at + call.len()..]);
            let argument = given.get(index).copied().unwrap_or_default();
            match argument.strip_prefix('"') {
                Some(literal) => add(literal.trim_end_matches('"'), Vec::new()),
                None => assert!(
                    number > 1 || NO_LITERALS.iter().any(|known| argument.starts_with(known)),
                    "{path}: {call}{argument}: is no literal, so this test does not find the code"
                ),
            }
        }
    }
    for kind in [": Code = Code::new(", ": &str = "] {
        for (at, _) in text.match_indices(kind) {
            let name = text[..at].rsplit(' ').next().unwrap_or_default();
            let code = literals(&text[at..]).next().unwrap_or_default();
            if kind.contains("Code") || name == "THREAD_UNSUPPORTED" {
                add(code, vec![name.to_owned()]);
            }
        }
    }
    for (at, _) in text.match_indices("let code = \"") {
        add(literals(&text[at..]).next().unwrap_or_default(), Vec::new());
    }
    for (start, file) in LITERALS {
        if let Some(at) = text.find(start).filter(|_| path.ends_with(file)) {
            literals(body(text, at)).for_each(|code| add(code, Vec::new()));
        }
    }
    for start in TABLES {
        for (at, _) in text.match_indices(start) {
            let (body, name) = (body(text, at), implemented(text, at));
            if start == "fn code(" && !body.contains("Code {") {
                continue;
            }
            for (code, names) in arms(body, name) {
                add(code, names);
            }
            if body.contains("self.into()") || body.contains("other.into()") {
                for (code, variant) in variants(text, name) {
                    let short = variant.replace(name, "Self");
                    if !body.contains(&format!("{short}(")) {
                        add(&code, vec![variant]);
                    }
                }
            }
        }
    }
}

/// All sources and codes. They are read once.
static ALL: LazyLock<(BTreeMap<String, String>, Codes)> = LazyLock::new(|| {
    let sources = sources();
    let codes = codes(&sources);
    (sources, codes)
});

/// Every code of the product.
fn codes(sources: &BTreeMap<String, String>) -> Codes {
    let mut codes = Codes::new();
    let definitions = "hearthnet-transport/src/code.rs";
    let named = sources[definitions]
        .split_once("shared_codes! {\n")
        .unwrap()
        .1;
    for line in named.lines().take_while(|line| *line != "}") {
        if let Some((name, code)) = line.split_once(" = ")
            && let Some(code) = literals(code).next()
        {
            let names = &mut codes.entry(code.to_owned()).or_default().names;
            names.insert(format!("Code::{}", name.trim()));
        }
    }
    for code in CloseCode::ALL {
        let names = &mut codes.entry(code.as_str().to_owned()).or_default().names;
        names.insert(format!("CloseCode::{code:?}"));
    }
    for (path, text) in sources {
        if path != definitions && crate_of(path).is_some() {
            scan(path, &production(text), &mut codes);
        }
    }
    // Uses of the constants.
    for (path, text) in sources {
        let Some(own) = crate_of(path).filter(|_| path != definitions) else {
            continue;
        };
        let text = production(text);
        for found in codes.values_mut() {
            let mut constants = found.names.iter();
            if constants.any(|name| name.contains("Code::") && names(&text, name)) {
                found.crates.insert(own.to_owned());
            }
        }
    }
    for (code, found) in &mut codes {
        found.names.insert(format!("\"{code}\""));
    }
    codes
}

/// Returns whether a text has a name, and not only as the beginning of a longer one.
fn names(text: &str, name: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(name)
        .any(|(at, _)| !text[..at].ends_with(part) && !text[at + name.len()..].starts_with(part))
}

/// Functions, constants and macros of a file: name, attributes before it, and text.
fn items(text: &str) -> Vec<(String, String, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let mut words = line.split_whitespace().skip_while(|word| {
            word.starts_with("pub") || ["async", "unsafe", "const"].contains(word)
        });
        let is_const = line.trim_start().starts_with("const ") && line.contains(':');
        let name = match words.next() {
            Some("fn" | "static" | "macro_rules!") => words.next(),
            word if is_const => word,
            _ => None,
        };
        let Some(name) = name else { continue };
        let name = name
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .next();
        let indent = &line[..line.len() - line.trim_start().len()];
        let is_end = |other: &&&str| {
            let rest = other.strip_prefix(indent);
            rest.is_some_and(|rest| {
                rest.starts_with(['}', ']']) || rest.starts_with(')') && !rest.ends_with('{')
            })
        };
        let one_line = line.ends_with(';') || line.ends_with('}');
        let rest = lines[at + 1..].iter();
        let length = match one_line {
            true => 0,
            false => rest.take_while(|line| !is_end(line)).count() + 1,
        };
        let before = lines[..at].iter().rev();
        let attributes = before.take_while(|line| line.trim_start().starts_with(['#', '/']));
        let attributes: Vec<&str> = attributes.copied().collect();
        let end = (at + length + 1).min(lines.len());
        found.push((
            name.unwrap_or_default().to_owned(),
            attributes.join("\n"),
            lines[at..end].join("\n"),
        ));
    }
    found
}

/// Text of a test, and of the items of its file that it uses, directly or through others.
fn reach(text: &str, test: &str) -> Option<String> {
    // In some files the code stands before its tests.
    let tests = text.split_once(TESTS).map_or(text, |(_, tests)| tests);
    let items = items(tests);
    let is_test = |marks: &str| {
        let mut tests = ["#[test]", "#[tokio::test"].into_iter();
        tests.any(|test| marks.contains(test))
    };
    let mut tests = items.iter();
    let (_, _, body) = tests.find(|(name, marks, _)| name == test && is_test(marks))?;
    let (mut whole, mut seen) = (body.clone(), BTreeSet::from([test.to_owned()]));
    loop {
        let new = items.iter().filter(|(name, ..)| names(&whole, name));
        let new: Vec<_> = new.filter(|(name, ..)| seen.insert(name.clone())).collect();
        if new.is_empty() {
            return Some(whole);
        }
        for (_, _, text) in new {
            whole.push('\n');
            whole.push_str(text);
        }
    }
}

/// Lines of a production source, from 1 on, that raise a code: they name it, and are neither a
/// comparison nor a pattern. Also lines that map an error to it: errors of libraries and of the system
/// become errors of the product without a line of their own.
fn raising(text: &str, found: &Found) -> BTreeSet<usize> {
    let mut tables = Vec::new();
    for start in TABLES {
        for (at, _) in text.match_indices(start) {
            let first = text[..at].matches('\n').count();
            let of = format!("{}::", implemented(text, at));
            let maps = found.names.iter().any(|name| name.starts_with(&of));
            let lines = first..first + body(text, at).matches('\n').count() + 1;
            tables.push((lines, maps));
        }
    }
    let mut raising = BTreeSet::new();
    for (number, line) in text.lines().enumerate() {
        let table = tables.iter().find(|(lines, _)| lines.contains(&number));
        let (before, after) = line.split_once("=>").unwrap_or(("", line));
        let named = |part: &str| found.names.iter().any(|name| names(part, name));
        let compares = ["==", "!=", "matches!(", "if let ", "const "];
        let compares = compares.iter().any(|mark| after.contains(mark));
        let raises = match table {
            // `strum` maps all variants in one line.
            Some((_, maps)) => named(after) || named(before) || *maps && line.contains(".into()"),
            None => named(after) && !compares,
        };
        if raises {
            raising.insert(number + 1);
        }
    }
    raising
}

fn table() -> PathBuf {
    root().join("specs/error-codes.md")
}

/// Cells of the table: crates, test, receiver, test of the receiver. By code.
fn listed(text: &str) -> BTreeMap<String, [String; 4]> {
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    let rows = rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let ["", code, crates, test, receiver, handled, ""] = cells[..] else {
            panic!("not five cells: {row}");
        };
        let cells = [crates, test, receiver, handled].map(str::to_owned);
        (code.trim_matches('`').to_owned(), cells)
    });
    rows.collect()
}

fn row(code: &str, found: &Found, hand: Option<&[String; 4]>) -> String {
    let crates: Vec<&str> = found.crates.iter().map(String::as_str).collect();
    let [_, test, receiver, handled] = hand.cloned().unwrap_or_default();
    let crates = crates.join(", ").replace("hearthnet-", "");
    format!("| `{code}` | {crates} | {test} | {receiver} | {handled} |")
}

#[test]
fn the_table_of_error_codes_is_that_of_the_sources() {
    let (_, codes) = &*ALL;
    let text = fs::read_to_string(table()).unwrap();
    let by_hand = listed(&text);
    let rows: Vec<String> = codes
        .iter()
        .map(|(code, found)| row(code, found, by_hand.get(code)))
        .collect();
    if std::env::var_os("UPDATE").is_some() {
        let head = text.lines().take_while(|line| !line.starts_with("| `"));
        let lines: Vec<&str> = head.chain(rows.iter().map(String::as_str)).collect();
        return fs::write(table(), lines.join("\n") + "\n").unwrap();
    }
    let listed: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("| `"))
        .collect();
    let wrong: Vec<&String> = rows
        .iter()
        .filter(|row| !listed.contains(&row.as_str()))
        .collect();
    assert!(
        wrong.is_empty(),
        "not in the table, or with other crates: {wrong:#?}"
    );
    let gone: Vec<&str> = listed
        .into_iter()
        .filter(|row| !rows.iter().any(|found| found == row))
        .collect();
    assert!(gone.is_empty(), "in no source: {gone:#?}");
}

/// Fault of a test of the table, a cell of which names it: `None` if it asserts, and names the code.
fn fault_of(cell: &str, code: &str) -> Option<&'static str> {
    let (sources, codes) = &*ALL;
    let (path, name) = cell.trim_matches('`').split_once("::").unwrap_or_default();
    let test = sources.get(path).and_then(|text| reach(text, name));
    let by = codes.get(code).map(|found| &found.names);
    match (test, by) {
        (None, _) => Some("there is no such test"),
        (_, None) => Some("there is no such code"),
        (Some(test), Some(by)) if !by.iter().any(|name| names(&test, name)) => {
            Some("the test does not name the code")
        }
        (Some(test), _) if !test.contains("assert") => Some("the test asserts nothing"),
        _ => None,
    }
}

#[test]
fn every_error_code_is_raised_and_handled_in_the_tests_that_the_table_names() {
    let mut wrong = Vec::new();
    for (code, [_, test, receiver, handled]) in listed(&fs::read_to_string(table()).unwrap()) {
        for (what, cell) in [("raised", test), ("handled", handled)] {
            if let Some(fault) = fault_of(&cell, &code) {
                wrong.push(format!("{code}, {what}: {fault}: {cell}"));
            }
        }
        if receiver.is_empty() {
            wrong.push(format!("{code}: nothing is said of its receiver"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn no_error_code_is_left_that_nothing_raises() {
    let (_, codes) = &*ALL;
    assert!(codes.len() > 150, "only {} codes were found", codes.len());
    let dead = codes.iter().filter(|(_, found)| found.crates.is_empty());
    let dead: Vec<&String> = dead.map(|(code, _)| code).collect();
    assert!(dead.is_empty(), "{dead:?}");
}

/// Reads what `tests/codes` recorded: for each code a file with the lines that its test ran, each as
/// `PATH:NUMBER`.
#[test]
#[ignore = "`tests/codes` runs the tests of the table before it"]
fn every_test_of_the_table_runs_a_line_that_raises_its_code() {
    let folder = std::env::var_os("HEARTHNET_CODES").expect("HEARTHNET_CODES names a folder");
    let (sources, codes) = &*ALL;
    let texts: BTreeMap<&String, String> = sources
        .iter()
        .filter(|(path, _)| {
            crate_of(path).is_some() && !path.ends_with("hearthnet-transport/src/code.rs")
        })
        .map(|(path, text)| (path, production(text)))
        .collect();
    let mut wrong = Vec::new();
    for (code, found) in codes {
        let ran = fs::read_to_string(Path::new(&folder).join(code)).unwrap_or_default();
        let ran: BTreeSet<&str> = ran.lines().collect();
        let places = texts.iter().flat_map(|(path, text)| {
            let lines = raising(text, found).into_iter();
            lines.map(move |line| format!("{path}:{line}"))
        });
        let raised: Vec<String> = places.collect();
        match raised.iter().find(|place| ran.contains(place.as_str())) {
            Some(place) => println!("{code}: {place}"),
            None => wrong.push(format!("{code}: none of {raised:?} ran")),
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}: {wrong:#?}",
        wrong.len(),
        codes.len()
    );
}
