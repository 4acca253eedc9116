use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use hearthnet_files::spec::CacheDtype;

use super::*;
use crate::kernels::{PAGE, key_cell, value_cell, write_kv};
use crate::sequence::SeqId;
use crate::sequences::{Limits, Table};

type Cache = Table<HostMemory>;

/// Two layers with different heads.
const PLACES: [KvPlace; 2] = [
    KvPlace {
        kv_heads: 3,
        head_dim: 4,
        cache: CacheDtype::F16,
        first: 0,
    },
    KvPlace {
        kv_heads: 2,
        head_dim: 8,
        cache: CacheDtype::F16,
        first: 3 * 2 * PAGE * 4,
    },
];
const ALL: Range<u32> = 5..7;

fn geometry() -> Geometry {
    let [first, second] = PLACES;
    assert_eq!(second.first, first.cells());
    Geometry {
        page_cells: first.cells() + second.cells(),
    }
}

/// Number, width and range of the slab of each head of each layer.
fn slabs() -> impl Iterator<Item = (usize, usize, Range<usize>)> {
    let heads = PLACES.into_iter().flat_map(|place| {
        let heads = 0..place.kv_heads;
        heads.map(move |head| (place.head_dim, place.slab(head)))
    });
    let numbered = heads.enumerate();
    numbered.map(|(slab, (dim, range))| (slab, dim, range))
}

fn page_bytes() -> u64 {
    geometry().footprint().page_bytes()
}

fn cache(pages: u64, context: u32) -> Cache {
    let limits = Limits {
        bytes: pages * page_bytes(),
        context,
        sequences: 12,
    };
    let pages = HostPages::new(geometry(), limits.bytes);
    let memory = Memory::new(geometry().footprint(), pages, HostStates::new(0));
    Table::new(memory, limits)
}

/// A finite binary16 that depends on the token and the cell.
fn cell(token: u16, position: usize, run: usize, i: usize) -> u16 {
    let mixed = (usize::from(token) * 31 + position) * 101 + run * 7 + i;
    (((mixed * 40_503) >> 3) as u16) & 0xbbff
}

/// Appends tokens as the engine does: begin, write, finish.
fn append(cache: &mut Cache, batch: &[(SeqId, &[u16])]) -> Result<(), EngineError> {
    let span = |&(seq, tokens): &(SeqId, &[u16])| {
        Span::new(seq, cache.len(seq).unwrap_or(0), tokens.len() as u32)
    };
    let spans: Vec<Span> = batch.iter().map(span).collect();
    let begun = cache.begin(&ALL, &spans);
    if begun.is_ok() {
        write(cache, batch, &spans);
    }
    cache.finish(&ALL, &spans, begun)
}

fn write(cache: &mut Cache, batch: &[(SeqId, &[u16])], spans: &[Span]) {
    let (memory, sequences) = cache.batch(spans);
    let tables = memory.views(&sequences, spans).pages;
    for ((span, (_, tokens)), table) in spans.iter().zip(batch).zip(tables) {
        for (position, token) in (span.position as usize..).zip(*tokens) {
            for (slab, dim, range) in slabs() {
                // SAFETY: there is one thread, and the slice is dropped before the next one.
                #[allow(unsafe_code)]
                let cells = unsafe { table[position / PAGE].slice_mut(range) };
                let [keys, values] = [0, 1].map(|run| {
                    (0..dim)
                        .map(|i| cell(*token, position, 2 * slab + run, i))
                        .collect::<Vec<u16>>()
                });
                write_kv(cells, position % PAGE, &keys, &values);
            }
        }
    }
}

/// Cells of these tokens: per head slab, all keys, then all values.
fn expected(tokens: &[u16]) -> Vec<u16> {
    let mut out = Vec::new();
    for (slab, dim, _) in slabs() {
        for run in [2 * slab, 2 * slab + 1] {
            for (position, token) in tokens.iter().enumerate() {
                for i in 0..dim {
                    out.push(cell(*token, position, run, i));
                }
            }
        }
    }
    out
}

/// Cells that a sequence holds, in the order of [`expected`].
fn content(cache: &mut Cache, seq: SeqId) -> Vec<u16> {
    let len = cache.len(seq).unwrap() as usize;
    let (memory, sequences) = cache.batch(&[Span::new(seq, 0, 0)]);
    let table = &sequences[0].table;
    let cells: [fn(usize, usize, usize) -> usize; 2] = [key_cell, value_cell];
    let mut out = Vec::new();
    for (_, dim, range) in slabs() {
        for cell_of in cells {
            for position in 0..len {
                let page = &memory.pages().pages[table[position / PAGE]];
                let page = &page[range.clone()];
                out.extend((0..dim).map(|i| page[cell_of(dim, position % PAGE, i)]));
            }
        }
    }
    out
}

#[track_caller]
fn assert_holds(cache: &mut Cache, seq: SeqId, tokens: &[&[u16]]) {
    assert_eq!(content(cache, seq), expected(&tokens.concat()));
}

/// Ends a batch as the engine does when a block fails.
fn fail(cache: &mut Cache, spans: &[Span]) {
    let failed = Err(EngineError::InputNotFinite(0));
    assert!(cache.finish(&ALL, spans, failed).is_err());
}

fn tokens(count: usize, salt: u16) -> Vec<u16> {
    (0..count as u16)
        .map(|i| i.wrapping_mul(17).wrapping_add(salt))
        .collect()
}

#[test]
fn a_fork_takes_no_pages_until_one_side_appends() {
    let mut cache = cache(10, 1000);
    let a = cache.open().unwrap();
    let first = tokens(PAGE + 3, 1);
    append(&mut cache, &[(a, &first)]).unwrap();
    let b = cache.fork(a).unwrap();
    assert_eq!(cache.bytes_in_use(), 2 * page_bytes());
    append(&mut cache, &[(b, &[900])]).unwrap();
    let used = cache.bytes_in_use();
    assert_eq!(used, 3 * page_bytes(), "one copy of the last page");
    append(&mut cache, &[(a, &[800, 801])]).unwrap();
    let used = cache.bytes_in_use();
    assert_eq!(used, 3 * page_bytes(), "the original owns its page now");
    assert_holds(&mut cache, a, &[&first, &[800, 801]]);
    assert_holds(&mut cache, b, &[&first, &[900]]);
    assert!(cache.close(a));
    assert_holds(&mut cache, b, &[&first, &[900]]);
    assert!(cache.close(b));
    assert_eq!(cache.bytes_in_use(), 0);
}

#[test]
fn forks_that_append_in_one_batch_diverge() {
    let mut cache = cache(4, 1000);
    let a = cache.open().unwrap();
    append(&mut cache, &[(a, &[1, 2])]).unwrap();
    let b = cache.fork(a).unwrap();
    append(&mut cache, &[(a, &[3]), (b, &[4, 5])]).unwrap();
    assert_holds(&mut cache, a, &[&[1, 2, 3]]);
    assert_holds(&mut cache, b, &[&[1, 2, 4, 5]]);
    assert_eq!(cache.bytes_in_use(), 2 * page_bytes());
}

#[test]
fn a_full_budget_is_refused_and_changes_nothing() {
    let mut cache = cache(3, 10_000);
    let (a, b) = (cache.open().unwrap(), cache.open().unwrap());
    append(&mut cache, &[(a, &tokens(PAGE + 1, 3))]).unwrap();
    let page = page_bytes();
    let batch: &[(SeqId, &[u16])] = &[(b, &[1]), (a, &tokens(PAGE, 4))];
    assert_eq!(
        append(&mut cache, batch),
        Err(EngineError::KvFull {
            needed: 2 * page,
            free: page,
            limit: 3 * page
        })
    );
    assert_eq!((cache.len(a), cache.len(b)), (Ok(PAGE as u32 + 1), Ok(0)));
    assert_eq!(cache.bytes_in_use(), 2 * page);
    assert_holds(&mut cache, a, &[&tokens(PAGE + 1, 3)]);
    // The remaining budget is usable, and closing a sequence frees its budget.
    append(&mut cache, &[(b, &tokens(PAGE, 5))]).unwrap();
    cache.close(a);
    append(&mut cache, &[(b, &tokens(2 * PAGE, 6))]).unwrap();
}

#[test]
fn a_copy_counts_against_the_budget() {
    let mut cache = cache(1, 1000);
    let a = cache.open().unwrap();
    append(&mut cache, &[(a, &[1])]).unwrap();
    let b = cache.fork(a).unwrap();
    assert!(matches!(
        append(&mut cache, &[(b, &[2])]),
        Err(EngineError::KvFull { .. })
    ));
    cache.close(a);
    append(&mut cache, &[(b, &[2])]).unwrap();
    assert_holds(&mut cache, b, &[&[1, 2]]);
}

#[test]
fn spans_that_do_not_fit_are_refused() {
    let mut cache = cache(100, 50);
    let seq = cache.open().unwrap();
    append(&mut cache, &[(seq, &tokens(40, 0))]).unwrap();
    let refusal = |cache: &mut Cache, position, rows| {
        let begun = cache.begin(&ALL, &[Span::new(seq, position, rows)]);
        begun.unwrap_err()
    };
    let gap = |position| EngineError::PositionGap {
        seq,
        position,
        len: 40,
    };
    assert_eq!(refusal(&mut cache, 41, 1), gap(41));
    assert_eq!(refusal(&mut cache, 39, 1), gap(39));
    assert_eq!(refusal(&mut cache, 40, 0), EngineError::EmptySpan(seq));
    let full = |wanted| EngineError::ContextFull { wanted, limit: 50 };
    assert_eq!(refusal(&mut cache, 40, 11), full(51));
    assert_eq!(
        refusal(&mut cache, 40, u32::MAX),
        full(u64::from(u32::MAX) + 40)
    );
    let span = Span::new(seq, 40, 1);
    assert_eq!(
        cache.begin(&ALL, &[span, span]),
        Err(EngineError::DuplicateSequence(seq))
    );
    assert_eq!(cache.truncate(seq, 41), Err(gap(41)));
    append(&mut cache, &[(seq, &tokens(10, 0))]).unwrap();
}

#[test]
fn a_closed_sequence_is_unknown_and_its_id_is_not_used_again() {
    let mut cache = cache(4, 100);
    let a = cache.open().unwrap();
    assert!(cache.close(a));
    assert!(!cache.close(a));
    let b = cache.open().unwrap();
    assert_ne!(a, b);
    assert_eq!(cache.len(a), Err(EngineError::UnknownSequence(a)));
    assert_eq!(cache.fork(a), Err(EngineError::UnknownSequence(a)));
    assert_eq!(cache.truncate(a, 0), Err(EngineError::UnknownSequence(a)));
    assert_eq!(
        append(&mut cache, &[(a, &[1])]),
        Err(EngineError::UnknownSequence(a))
    );
}

#[test]
fn sequences_are_limited() {
    let mut cache = cache(4, 100);
    let first = cache.open().unwrap();
    for _ in 1..12 {
        cache.open().unwrap();
    }
    let full = EngineError::TooManySequences(12);
    assert_eq!(cache.open(), Err(full.clone()));
    assert_eq!(cache.fork(first), Err(full));
}

#[test]
fn freed_pages_come_back_as_zeros() {
    let mut cache = cache(2, 100);
    let a = cache.open().unwrap();
    append(&mut cache, &[(a, &tokens(2 * PAGE, 9))]).unwrap();
    cache.truncate(a, 3).unwrap();
    let b = cache.open().unwrap();
    let spans = [Span::new(b, 0, PAGE as u32)];
    let begun = cache.begin(&ALL, &spans);
    cache.finish(&ALL, &spans, begun).unwrap();
    assert!(content(&mut cache, b).iter().all(|cell| *cell == 0));
}

#[test]
fn a_batch_that_failed_leaves_lengths_and_pages_as_they_were() {
    let mut cache = cache(9, 1000);
    let a = cache.open().unwrap();
    append(&mut cache, &[(a, &tokens(5, 2))]).unwrap();
    let before = cache.bytes_in_use();
    let spans = [Span::new(a, 5, 3 * PAGE as u32)];
    cache.begin(&ALL, &spans).unwrap();
    assert!(cache.bytes_in_use() > before);
    fail(&mut cache, &spans);
    assert_eq!((cache.bytes_in_use(), cache.len(a)), (before, Ok(5)));
    assert_holds(&mut cache, a, &[&tokens(5, 2)]);
}

#[test]
fn a_sequence_stays_with_the_layers_that_it_ran_through() {
    let mut cache = cache(4, 100);
    let seq = cache.open().unwrap();
    let span = |position| [Span::new(seq, position, 2)];
    let begun = cache.begin(&(6..7), &span(0));
    cache.finish(&(6..7), &span(0), begun).unwrap();
    let error = EngineError::OtherLayers {
        seq,
        ran: 6..7,
        asked: ALL,
    };
    assert_eq!(cache.begin(&ALL, &span(2)), Err(error));
    cache.begin(&(6..7), &span(2)).unwrap();
    fail(&mut cache, &span(2));
    assert_eq!(cache.truncate(seq, 0), Ok(0));
    cache.begin(&ALL, &span(0)).unwrap();
}

#[derive(Clone, Debug)]
enum Op {
    Open,
    Append(Vec<(usize, usize)>),
    Truncate(usize, usize),
    Fork(usize),
    Close(usize),
    Fail(usize, usize),
}

fn op() -> impl Strategy<Value = Op> {
    let which = 0..100usize;
    prop_oneof![
        Just(Op::Open),
        prop::collection::vec((which.clone(), 1..80usize), 1..4).prop_map(Op::Append),
        (which.clone(), 0..100usize).prop_map(|(seq, len)| Op::Truncate(seq, len)),
        which.clone().prop_map(Op::Fork),
        which.clone().prop_map(Op::Close),
        (which, 1..80usize).prop_map(|(seq, rows)| Op::Fail(seq, rows)),
    ]
}

/// Checks that no page leaks, and that pages in use do not exceed those of unshared sequences.
fn check_pages(cache: &mut Cache, model: &[(SeqId, Vec<u16>)]) -> TestCaseResult {
    let spans: Vec<Span> = model.iter().map(|(seq, _)| Span::new(*seq, 0, 0)).collect();
    let (memory, sequences) = cache.batch(&spans);
    let tables = sequences.into_iter().flat_map(|sequence| &sequence.table);
    let owned: std::collections::BTreeSet<usize> = tables.copied().collect();
    let in_use = memory.pages_in_use() as usize;
    prop_assert_eq!(in_use, owned.len(), "no page is lost or counted twice");
    let most = model.iter().map(|(_, tokens)| tokens.len().div_ceil(PAGE));
    prop_assert!(owned.len() <= most.sum::<usize>());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_operations_agrees_with_lists_of_tokens(
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut cache = cache(14, 150);
        let mut model: Vec<(SeqId, Vec<u16>)> = Vec::new();
        let mut salt = 0u16;
        for op in ops {
            let pick = |index: usize| index % model.len().max(1);
            match op {
                Op::Open => {
                    if let Ok(seq) = cache.open() {
                        model.push((seq, Vec::new()));
                    }
                }
                _ if model.is_empty() => {}
                Op::Append(batch) => {
                    let mut rows: Vec<(usize, Vec<u16>)> = Vec::new();
                    for (index, count) in batch {
                        salt += 1;
                        let index = pick(index);
                        if rows.iter().all(|(other, _)| *other != index) {
                            rows.push((index, tokens(count, salt * 1000)));
                        }
                    }
                    let batch: Vec<(SeqId, &[u16])> =
                        rows.iter().map(|(index, row)| (model[*index].0, &row[..])).collect();
                    let used = cache.bytes_in_use();
                    match append(&mut cache, &batch) {
                        Ok(()) => for (index, row) in rows {
                            model[index].1.extend(row);
                        },
                        Err(EngineError::KvFull { .. } | EngineError::ContextFull { .. }) => {
                            prop_assert_eq!(cache.bytes_in_use(), used);
                        }
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                }
                Op::Truncate(index, len) => {
                    let index = pick(index);
                    let (seq, tokens) = &mut model[index];
                    let fits = len <= tokens.len();
                    prop_assert_eq!(cache.truncate(*seq, len as u32).is_ok(), fits);
                    tokens.truncate(len);
                }
                Op::Fork(index) => {
                    let (seq, tokens) = model[pick(index)].clone();
                    if let Ok(fork) = cache.fork(seq) {
                        model.push((fork, tokens));
                    }
                }
                Op::Close(index) => {
                    let (seq, _) = model.swap_remove(pick(index));
                    prop_assert!(cache.close(seq));
                }
                Op::Fail(index, rows) => {
                    let (seq, tokens) = &model[pick(index)];
                    let spans = [Span::new(*seq, tokens.len() as u32, rows as u32)];
                    let _ = cache.begin(&ALL, &spans);
                    fail(&mut cache, &spans);
                }
            }
            for (seq, tokens) in &model {
                prop_assert_eq!(content(&mut cache, *seq), expected(tokens));
            }
            prop_assert_eq!(cache.sequences(), model.len());
            check_pages(&mut cache, &model)?;
        }
        for (seq, _) in model {
            cache.close(seq);
        }
        prop_assert_eq!(cache.bytes_in_use(), 0);
    }
}
