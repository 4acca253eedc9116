//! `--dump`: rows for `tests/measure/inverter.py`, which trains a network on them.
//!
//! | file | content, little-endian |
//! |---|---|
//! | `table` | fp32 embeddings of all tokens |
//! | `SET.ids`, `SET.texts` | u32 token, and u32 number of its text, per row |
//! | `SET.DEPTH` | fp32 rows that enter layer DEPTH |
//! | `languages` | names of the texts of the set `languages`, one per line |
//!
//! The sets are `attacker` (text that the model writes, and as many random tokens, which cover the
//! vocabulary of all languages), `books` (`texts.txt`) and `languages` ([`LANGUAGES`]). The first row of
//! each text is left out.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::Path;

use hearthnet_testkit::LANGUAGES;

use super::{Chance, DEPTHS, Lab, Outcome, Seen, TEXT, TEXTS};

/// Tokens of a random text.
const RANDOM: usize = 257;

impl Lab {
    /// Writes all sets. `learned`: what the model wrote.
    pub(crate) fn dump(&mut self, mut learned: Seen, folder: &Path) -> Outcome<()> {
        fs::create_dir_all(folder)?;
        values(&folder.join("table"), &self.table)?;
        let mut chance = Chance(0xb5ad_4ece_da1c_e2a9);
        let count = learned.ids.len().div_ceil(RANDOM - 1);
        let random: Vec<Vec<u32>> = (0..count)
            .map(|_| chance.tokens(RANDOM, self.norms.len()))
            .collect();
        let random = self.read(&random)?;
        let numbers = random.texts.iter().map(|text| text + TEXTS as u32);
        learned.texts.extend(numbers);
        learned.ids.extend(random.ids);
        for (all, rows) in learned.rows.iter_mut().zip(random.rows) {
            all.extend(rows);
        }
        set(folder, "attacker", &learned)?;
        let books = self.encode(TEXT.split("\n\n"))?;
        set(folder, "books", &self.read(&books)?)?;
        let languages = self.encode(LANGUAGES.into_iter().map(|(_, text)| text))?;
        set(folder, "languages", &self.read(&languages)?)?;
        let names = LANGUAGES.map(|(name, _)| name).join("\n");
        Ok(fs::write(folder.join("languages"), names)?)
    }
}

fn set(folder: &Path, name: &str, seen: &Seen) -> Outcome<()> {
    numbers(&folder.join(format!("{name}.ids")), &seen.ids)?;
    numbers(&folder.join(format!("{name}.texts")), &seen.texts)?;
    for (depth, rows) in DEPTHS.into_iter().zip(&seen.rows) {
        values(&folder.join(format!("{name}.{depth}")), rows)?;
    }
    Ok(())
}

fn values(path: &Path, values: &[f32]) -> Outcome<()> {
    let mut out = BufWriter::new(File::create(path)?);
    for value in values {
        out.write_all(&value.to_le_bytes())?;
    }
    Ok(out.flush()?)
}

fn numbers(path: &Path, numbers: &[u32]) -> Outcome<()> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    Ok(fs::write(path, bytes)?)
}
