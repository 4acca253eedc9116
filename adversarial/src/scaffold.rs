//! `hearthnet adversarial new`: writes a new attack into a checkout, and registers it.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::attacks::TEMPLATE;
use crate::{HarnessError, Result};

/// Longest name: the table of a run has a column for it.
const LONGEST: usize = 63;
/// Folder of the suite in a checkout.
const SUITE: &str = "adversarial/src";

/// New attack.
#[derive(Debug)]
pub struct Made {
    pub name: String,
    /// Number of its case.
    pub case: u8,
    /// Root of the checkout.
    pub checkout: PathBuf,
    /// Files that were written or changed, from the root of the checkout.
    pub files: [PathBuf; 3],
}

/// Writes an attack with this name into the checkout that contains `folder`.
///
/// # Errors
/// If the name cannot be one, `folder` is in no checkout, or the files cannot be written.
pub fn new_attack(folder: &Path, name: &str) -> Result<Made> {
    let name = name.replace([' ', '-'], "_");
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if !name.starts_with(|c: char| c.is_ascii_lowercase())
        || !name.chars().all(is_part)
        || name.len() > LONGEST
    {
        return Err(HarnessError::usage(format!(
            "`{name}` cannot be the name of an attack: write the claim in small letters and digits, \
             at most {LONGEST}, for example a_full_stream_takes_no_more_rows"
        )));
    }
    let is_checkout = |root: &&Path| root.join(SUITE).join("attacks/mod.rs").is_file();
    let checkout = folder.ancestors().find(is_checkout).ok_or_else(|| {
        HarnessError::usage(
            "an attack is compiled into the suite, so a new one needs a checkout of HearthNet: run \
             this command in one, or choose one with --checkout",
        )
    })?;
    let suite = Path::new(SUITE);
    let files = [
        suite.join("attacks").join(format!("{name}.rs")),
        suite.join("case.rs"),
        suite.join("attacks/mod.rs"),
    ];
    let [attack, cases, registry] = files.each_ref().map(|file| checkout.join(file));
    let (case, new_cases) = with_case(&fs::read_to_string(&cases)?)?;
    let new_registry = with_entry(&fs::read_to_string(&registry)?, case, &name)?;
    let opened = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&attack);
    let mut file = opened.map_err(|error| {
        let path = attack.display();
        HarnessError::usage(format!("cannot make {path}: {error}; choose another name"))
    })?;
    file.write_all(TEMPLATE.source.as_bytes())?;
    fs::write(cases, new_cases)?;
    fs::write(registry, new_registry)?;
    Ok(Made {
        name,
        case,
        checkout: checkout.to_owned(),
        files,
    })
}

/// Catalogue with one more case, and its number.
fn with_case(text: &str) -> Result<(u8, String)> {
    let numbers = text.lines().filter_map(|line| {
        let (number, _) = line.strip_prefix("        ")?.split_once(" \"")?;
        number.parse::<u8>().ok()
    });
    let next = numbers.max().and_then(|last| last.checked_add(1));
    let case = next.ok_or_else(|| HarnessError::usage("the catalogue has no number left"))?;
    let group = format!(
        "    \"new\" {{\n        {case} \"what the attacker does\" \"frame_sequence\",\n    }}\n"
    );
    let text = inserted(text, "\ncases! {\n", "\n}\n", &group, "case.rs")?;
    Ok((case, text))
}

/// Registry with one more entry.
fn with_entry(text: &str, case: u8, name: &str) -> Result<String> {
    let entry = format!("                {case} {name};\n");
    inserted(
        text,
        "            files {\n",
        "\n            }\n",
        &entry,
        "mod.rs",
    )
}

/// Text with `new` as the last line of the block between `begin` and `end`.
fn inserted(text: &str, begin: &str, end: &str, new: &str, file: &str) -> Result<String> {
    let at = text.find(begin).and_then(|begin| {
        let rest = text.get(begin..)?;
        Some(begin + rest.find(end)? + 1)
    });
    let parts = at.and_then(|at| text.split_at_checked(at));
    let (before, after) = parts.ok_or_else(|| {
        HarnessError::usage(format!(
            "{file} of this checkout is not as this version knows it: register the attack by hand, \
             as adversarial/README.md says"
        ))
    })?;
    Ok(format!("{before}{new}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A checkout with copies of the suite's catalogue and registry.
    fn checkout() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let suite = root.path().join(SUITE);
        fs::create_dir_all(suite.join("attacks")).unwrap();
        fs::write(suite.join("case.rs"), include_str!("case.rs")).unwrap();
        fs::write(suite.join("attacks/mod.rs"), include_str!("attacks/mod.rs")).unwrap();
        root
    }

    #[test]
    fn a_new_attack_is_written_and_registered_with_the_next_number() {
        let root = checkout();
        let below = root.path().join("adversarial");
        let last = crate::CASES.last().unwrap().number;
        for (number, name) in [(last + 1, "a claim"), (last + 2, "another_claim")] {
            let made = new_attack(&below, name).unwrap();
            assert_eq!((made.case, made.checkout.as_path()), (number, root.path()));
            let [attack, cases, registry] = made.files.map(|file| {
                let text = fs::read_to_string(root.path().join(file));
                text.unwrap()
            });
            assert_eq!(attack, TEMPLATE.source);
            assert!(cases.contains(&format!("\n        {number} \"what the attacker does\"")));
            let name = name.replace(' ', "_");
            let entry = format!("\n                {number} {name};\n");
            let files = registry.split("            files {\n").nth(1).unwrap();
            assert!(
                files
                    .split("\n            }\n")
                    .next()
                    .unwrap()
                    .contains(entry.trim_end())
            );
        }
    }

    #[test]
    fn nothing_is_written_for_a_bad_name_a_taken_one_or_without_a_checkout() {
        let root = checkout();
        let long = "a".repeat(LONGEST + 1);
        for name in ["", "A_claim", "1claim", "a/b", "..", "é", &long] {
            let error = new_attack(root.path(), name).unwrap_err().to_string();
            assert!(error.contains("cannot be the name"), "{error}");
        }
        new_attack(root.path(), "a_claim").unwrap();
        let before = fs::read_to_string(root.path().join(SUITE).join("case.rs")).unwrap();
        let taken = new_attack(root.path(), "a_claim").unwrap_err().to_string();
        assert!(taken.contains("choose another name"), "{taken}");
        let after = fs::read_to_string(root.path().join(SUITE).join("case.rs")).unwrap();
        assert_eq!(after, before);
        let elsewhere = tempfile::tempdir().unwrap();
        let error = new_attack(elsewhere.path(), "a_claim").unwrap_err();
        assert!(error.to_string().contains("--checkout"));
    }
}
