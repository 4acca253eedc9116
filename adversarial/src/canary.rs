//! Unique random text, and the search for it in text, in files and in the memory of a process.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

use aho_corasick::AhoCorasick;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;

use crate::Result;

/// Random bytes of a canary. Its text has twice as many characters.
const RANDOM: usize = 32;
/// Characters of a piece that counts as a hit: 64 random bits.
const PIECE: usize = 16;
/// Bytes of memory read and searched at once.
const AT_ONCE: usize = 4 << 20;

/// Unique random text in pieces of [`PIECE`] characters, each searched in several encodings.
pub(crate) struct Canary {
    text: String,
    forms: Vec<&'static str>,
    search: AhoCorasick,
    longest: usize,
}

impl Canary {
    pub(crate) fn new() -> Result<Canary> {
        let mut random = [0; RANDOM];
        getrandom::fill(&mut random)?;
        Canary::of(&hex::encode(random))
    }

    /// Search for a given text.
    pub(crate) fn of(text: &str) -> Result<Canary> {
        let (mut forms, mut needles) = (Vec::new(), Vec::new());
        let mut add = |form, needle: Vec<u8>| {
            forms.push(form);
            needles.push(needle);
        };
        for piece in text.as_bytes().chunks_exact(PIECE) {
            // The model has byte tokens: the id of a token is the value of its byte.
            let ids = |bytes: fn(u32) -> Vec<u8>| -> Vec<u8> {
                piece.iter().flat_map(|&id| bytes(id.into())).collect()
            };
            add("text", piece.to_vec());
            add("UTF-16", ids(|id| vec![id as u8, 0]));
            add("token ids", ids(|id| id.to_le_bytes().to_vec()));
            add("hexadecimal", hex::encode(piece).into_bytes());
            for comma in [",", ", "] {
                let mut list = String::new();
                for id in piece {
                    let _ = write!(list, "{id}{comma}");
                }
                add("a list of token ids", list.into_bytes());
            }
            for skip in 0..3 {
                // Whole groups only: their encoding does not depend on the bytes around them.
                let groups = piece.get(skip..).unwrap_or_default();
                let groups = groups.get(..groups.len() / 3 * 3).unwrap_or_default();
                add("base64", STANDARD_NO_PAD.encode(groups).into_bytes());
            }
        }
        let longest = needles.iter().map(Vec::len).max().unwrap_or(1);
        Ok(Canary {
            text: text.to_owned(),
            forms,
            search: AhoCorasick::new(needles)?,
            longest,
        })
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Encodings in which `bytes` contains a piece of the canary.
    pub(crate) fn hits(&self, bytes: impl AsRef<[u8]>) -> Vec<&'static str> {
        let found = self.search.find_iter(bytes.as_ref());
        let form = |at: usize| self.forms.get(at).copied();
        found
            .filter_map(|hit| form(hit.pattern().as_usize()))
            .collect()
    }

    /// Files below `folder` whose content or name contains a piece of the canary.
    pub(crate) fn in_files(&self, folder: &Path) -> io::Result<Vec<String>> {
        let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder)? {
                let (entry, path) = entry.map(|entry| (entry.file_type(), entry.path()))?;
                let kind = entry?;
                let mut hits = self.hits(path.as_os_str().as_encoded_bytes());
                if kind.is_dir() {
                    folders.push(path.clone());
                } else if kind.is_file() {
                    hits.extend(self.hits(fs::read(&path)?));
                }
                if !hits.is_empty() {
                    found.push(format!("{}: {hits:?}", path.display()));
                }
            }
        }
        Ok(found)
    }

    /// Mappings of a process whose memory contains a piece of the canary. `None` if the system
    /// denies access.
    pub(crate) fn in_memory(&self, pid: u32) -> Result<Option<Vec<String>>> {
        use std::os::unix::fs::FileExt as _;

        let maps = fs::read_to_string(format!("/proc/{pid}/maps"));
        let memory = fs::File::open(format!("/proc/{pid}/mem"));
        let (maps, memory) = match (maps, memory) {
            (Ok(maps), Ok(memory)) => (maps, memory),
            (Err(why), _) | (_, Err(why)) if why.kind() == io::ErrorKind::PermissionDenied => {
                return Ok(None);
            }
            (Err(why), _) | (_, Err(why)) => return Err(why.into()),
        };
        let (mut found, mut buffer) = (Vec::new(), vec![0; AT_ONCE]);
        for line in maps.lines() {
            let mut fields = line.split_whitespace();
            let range = fields.next().and_then(|range| range.split_once('-'));
            let readable = fields.next().is_some_and(|rights| rights.starts_with('r'));
            let name = fields.nth(3).unwrap_or("anonymous");
            let Some((begin, end)) = range.filter(|_| readable && !name.starts_with("[v")) else {
                continue;
            };
            let (mut at, end) = (
                u64::from_str_radix(begin, 16)?,
                u64::from_str_radix(end, 16)?,
            );
            while at < end {
                let most = usize::try_from(end - at).unwrap_or(AT_ONCE).min(AT_ONCE);
                // A page that was unmapped meanwhile cannot be read.
                let part = buffer.get_mut(..most).unwrap_or_default();
                let Ok(read @ 1..) = memory.read_at(part, at) else {
                    break;
                };
                let hits = self.hits(part.get(..read).unwrap_or_default());
                found.extend(hits.into_iter().map(|form| format!("{form} in {name}")));
                let last = at + read as u64 >= end;
                // Parts overlap, so that a hit across their border is found.
                let step = if last {
                    read
                } else {
                    (read - read.min(self.longest)).max(1)
                };
                at += step as u64;
            }
        }
        Ok(Some(found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_found_in_each_of_its_forms_and_another_text_is_not() {
        let canary = Canary::new().unwrap();
        let text = canary.text();
        let ids: Vec<u32> = text.bytes().map(u32::from).collect();
        let raw: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        assert!(canary.hits(text).contains(&"text"));
        assert!(canary.hits(raw).contains(&"token ids"));
        assert!(!canary.hits(format!("{ids:?}")).is_empty());
        for before in ["", "a", "ab"] {
            let coded = STANDARD_NO_PAD.encode(format!("{before}{text}"));
            assert!(canary.hits(coded).contains(&"base64"), "{before}");
        }
        assert!(canary.hits(Canary::new().unwrap().text()).is_empty());
    }

    #[test]
    fn a_canary_of_this_process_is_found_in_its_memory() {
        let canary = Canary::new().unwrap();
        let found = canary.in_memory(std::process::id()).unwrap();
        assert!(found.is_none_or(|found| !found.is_empty()));
    }
}
