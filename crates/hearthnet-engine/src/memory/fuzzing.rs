//! Body of the fuzz target `kv_pages`, also used by tests that replay a fuzzer's findings. Not a
//! public interface.

use std::collections::BTreeSet;
use std::ops::Range;

use hearthnet_files::spec::CacheDtype;

use super::pages::{Geometry, HostPages, KvPlace};
use super::{HostMemory, Memory, PagedSequence};
use crate::error::EngineError;
use crate::kernels::{PAGE, key_cell, value_cell};
use crate::sequence::{SeqId, Span};
use crate::sequences::{Limits, Storage as _, Table};
use crate::state::HostStates;

/// A layer with one head.
const PLACE: KvPlace = KvPlace {
    kv_heads: 1,
    head_dim: 8,
    cache: CacheDtype::F16,
    first: 0,
};
const LAYERS: Range<u32> = 3..4;
/// Pages of the budget, positions of a sequence, and sequences.
const BUDGET: u64 = 12;
const CONTEXT: u32 = 150;
const SEQUENCES: usize = 8;

/// A sequence, and the tokens that were written into it.
type Model = Vec<(SeqId, Vec<u16>)>;

/// Drives the paged KV cache. Each operation is three bytes: the kind, a sequence, and a number.
///
/// | first byte modulo 8 | operation |
/// |---|---|
/// | 0 | open a sequence |
/// | 1, 2 | append rows |
/// | 3 | append rows to this sequence and to the next one in one batch |
/// | 4 | shorten to the number |
/// | 5 | fork |
/// | 6 | close |
/// | 7 | append rows in a batch that fails |
///
/// # Panics
/// If a sequence does not hold its tokens, a page is lost or is owned twice, the budget is exceeded,
/// or a refused operation changed something.
pub fn pages(input: &[u8]) {
    let geometry = Geometry {
        page_cells: PLACE.cells(),
    };
    let limits = Limits {
        bytes: BUDGET * geometry.footprint().page_bytes(),
        context: CONTEXT,
        sequences: SEQUENCES,
    };
    let pages = HostPages::new(geometry, limits.bytes);
    let memory = Memory::new(geometry.footprint(), pages, HostStates::new(0));
    let mut cache = Table::new(memory, limits);
    let mut model = Model::new();
    let operations = input.chunks_exact(3).take(512);
    for (salt, operation) in (1u16..).zip(operations) {
        let [kind, which, number] = [operation[0], operation[1], operation[2]];
        let index = usize::from(which) % model.len().max(1);
        if kind % 8 == 0 {
            match cache.open() {
                Ok(seq) => model.push((seq, Vec::new())),
                Err(error) => assert_eq!(error, EngineError::TooManySequences(SEQUENCES)),
            }
        } else if !model.is_empty() {
            match kind % 8 {
                1 | 2 => append(&mut cache, &mut model, &[index], number, salt),
                3 if model.len() > 1 => {
                    let both = [index, (index + 1) % model.len()];
                    append(&mut cache, &mut model, &both, number, salt);
                }
                3 => {}
                4 => {
                    let (seq, tokens) = &mut model[index];
                    let fits = usize::from(number) <= tokens.len();
                    assert_eq!(cache.truncate(*seq, number.into()).is_ok(), fits);
                    tokens.truncate(number.into());
                }
                5 => {
                    let (seq, tokens) = model[index].clone();
                    match cache.fork(seq) {
                        Ok(fork) => model.push((fork, tokens)),
                        Err(error) => assert_eq!(error, EngineError::TooManySequences(SEQUENCES)),
                    }
                }
                6 => {
                    let (seq, _) = model.swap_remove(index);
                    assert!(cache.close(seq) && !cache.close(seq));
                }
                _ => {
                    let (seq, tokens) = &model[index];
                    let spans = [Span::new(*seq, tokens.len() as u32, number.into())];
                    let before = cache.bytes_in_use();
                    let _ = cache.begin(&LAYERS, &spans);
                    let failed = Err(EngineError::InputNotFinite(0));
                    assert!(cache.finish(&LAYERS, &spans, failed).is_err());
                    assert!(cache.bytes_in_use() <= before + limits.bytes / BUDGET);
                }
            }
        }
        check(&mut cache, &model, limits.bytes);
    }
    for (seq, _) in model {
        assert!(cache.close(seq));
    }
    assert_eq!((cache.bytes_in_use(), cache.sequences()), (0, 0));
}

/// Appends rows to some sequences in one batch, as the engine does: begin, write, finish.
fn append(
    cache: &mut Table<HostMemory>,
    model: &mut Model,
    indices: &[usize],
    rows: u8,
    salt: u16,
) {
    let span = |&index: &usize| {
        let (seq, tokens) = &model[index];
        Span::new(*seq, tokens.len() as u32, rows.into())
    };
    let spans: Vec<Span> = indices.iter().map(span).collect();
    let before = cache.bytes_in_use();
    let begun = cache.begin(&LAYERS, &spans);
    let is_begun = begun.is_ok();
    if is_begun {
        let (memory, sequences) = cache.batch(&spans);
        for (span, sequence) in spans.iter().zip(sequences) {
            for position in (span.position as usize..).take(rows.into()) {
                let (page, slot) = (sequence.table[position / PAGE], position % PAGE);
                let cells = &mut memory.pages.memory.pages[page];
                cells[key_cell(PLACE.head_dim, slot, 7)] = token(salt, span, position);
                cells[value_cell(PLACE.head_dim, slot, 0)] = token(salt, span, position);
            }
        }
    }
    match cache.finish(&LAYERS, &spans, begun) {
        Ok(()) => {
            for (span, &index) in spans.iter().zip(indices) {
                let positions = (span.position as usize..).take(rows.into());
                let tokens = positions.map(|position| token(salt, span, position));
                model[index].1.extend(tokens);
            }
        }
        Err(EngineError::EmptySpan(_)) => assert_eq!(rows, 0),
        Err(error) => {
            let is_limit = matches!(
                error,
                EngineError::KvFull { .. } | EngineError::ContextFull { .. }
            );
            assert!(is_limit, "{error}");
            assert_eq!(cache.bytes_in_use(), before);
        }
    }
}

/// A number that differs between operations, sequences and positions.
fn token(salt: u16, span: &Span, position: usize) -> u16 {
    let sequence = span.seq.0 as u16;
    (salt.wrapping_mul(151) ^ sequence.wrapping_mul(7919)).wrapping_add(position as u16)
}

fn check(cache: &mut Table<HostMemory>, model: &Model, budget: u64) {
    assert_eq!(cache.sequences(), model.len());
    assert!(cache.bytes_in_use() <= budget);
    let spans: Vec<Span> = model.iter().map(|(seq, _)| Span::new(*seq, 0, 0)).collect();
    let (memory, sequences) = cache.batch(&spans);
    let mut owned = BTreeSet::new();
    for (PagedSequence { table, .. }, (_, tokens)) in sequences.into_iter().zip(model) {
        assert_eq!(table.len(), tokens.len().div_ceil(PAGE));
        for (position, token) in tokens.iter().enumerate() {
            let cells = &memory.pages().pages[table[position / PAGE]];
            let slot = position % PAGE;
            assert_eq!(cells[key_cell(PLACE.head_dim, slot, 7)], *token);
            assert_eq!(cells[value_cell(PLACE.head_dim, slot, 0)], *token);
        }
        owned.extend(table.iter().copied());
    }
    assert_eq!(memory.pages_in_use(), owned.len() as u64, "a page leaked");
}
