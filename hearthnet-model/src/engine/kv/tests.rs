use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::super::error::ImportError;
use super::*;
use crate::kernels::write_kv;

const GEOMETRY: Geometry = Geometry {
    first_layer: 5,
    layers: 2,
    kv_heads: 3,
    head_dim: 4,
};
const WEIGHTS: [u8; 32] = [7; 32];
const ALL: Range<u32> = 5..7;

fn cache(pages: u64, context: u32) -> KvCache {
    let limits = Limits {
        bytes: pages * GEOMETRY.page_bytes(),
        context,
        sequences: 12,
    };
    KvCache::new(GEOMETRY, limits)
}

/// A finite binary16 that names the token and the cell.
fn cell(token: u16, position: usize, run: usize, i: usize) -> u16 {
    let mixed = (usize::from(token) * 31 + position) * 101 + run * 7 + i;
    (((mixed * 40_503) >> 3) as u16) & 0xbbff
}

/// What the engine does: reserve, write, commit.
fn append(cache: &mut KvCache, batch: &[(SeqId, &[u16])]) -> Result<(), EngineError> {
    let spans: Vec<Span> = batch
        .iter()
        .map(|(seq, tokens)| {
            let position = cache.len(*seq).unwrap_or(0);
            Span {
                seq: *seq,
                position,
                rows: tokens.len() as u32,
            }
        })
        .collect();
    cache.reserve(&ALL, &spans)?;
    let tables = cache.views(&spans);
    for ((span, (_, tokens)), table) in spans.iter().zip(batch).zip(tables) {
        for (position, token) in (span.position as usize..).zip(*tokens) {
            for strip in 0..GEOMETRY.strips() {
                let range = GEOMETRY.strip(strip);
                // SAFETY: one thread, and nothing is kept.
                #[allow(unsafe_code)]
                let cells = unsafe { table[position / PAGE].slice_mut(range) };
                let [keys, values] = [0, 1].map(|run| {
                    (0..GEOMETRY.head_dim)
                        .map(|i| cell(*token, position, 2 * strip + run, i))
                        .collect::<Vec<u16>>()
                });
                write_kv(cells, position % PAGE, &keys, &values);
            }
        }
    }
    cache.commit(&ALL, &spans);
    Ok(())
}

/// The data of a snapshot of these tokens.
fn expected(tokens: &[u16]) -> Vec<u8> {
    let mut out = Vec::new();
    for run in 0..2 * GEOMETRY.strips() {
        for (position, token) in tokens.iter().enumerate() {
            for i in 0..GEOMETRY.head_dim {
                out.extend_from_slice(&cell(*token, position, run, i).to_le_bytes());
            }
        }
    }
    out
}

fn content(cache: &KvCache, seq: SeqId) -> Vec<u8> {
    let len = cache.len(seq).unwrap();
    cache.export(&WEIGHTS, seq, len).unwrap().as_bytes()[64..].to_vec()
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
    assert_eq!(cache.bytes_in_use(), 2 * GEOMETRY.page_bytes());
    append(&mut cache, &[(b, &[900])]).unwrap();
    assert_eq!(
        cache.bytes_in_use(),
        3 * GEOMETRY.page_bytes(),
        "one copy of the last page"
    );
    append(&mut cache, &[(a, &[800, 801])]).unwrap();
    assert_eq!(
        cache.bytes_in_use(),
        3 * GEOMETRY.page_bytes(),
        "the original owns its page now"
    );
    assert_eq!(
        content(&cache, a),
        expected(&[&first[..], &[800, 801]].concat())
    );
    assert_eq!(content(&cache, b), expected(&[&first[..], &[900]].concat()));
    assert!(cache.close(a));
    assert_eq!(content(&cache, b), expected(&[&first[..], &[900]].concat()));
    assert!(cache.close(b));
    assert_eq!(cache.bytes_in_use(), 0);
}

#[test]
fn forks_that_append_in_one_batch_part() {
    let mut cache = cache(4, 1000);
    let a = cache.open().unwrap();
    append(&mut cache, &[(a, &[1, 2])]).unwrap();
    let b = cache.fork(a).unwrap();
    append(&mut cache, &[(a, &[3]), (b, &[4, 5])]).unwrap();
    assert_eq!(content(&cache, a), expected(&[1, 2, 3]));
    assert_eq!(content(&cache, b), expected(&[1, 2, 4, 5]));
    assert_eq!(cache.bytes_in_use(), 2 * GEOMETRY.page_bytes());
}

#[test]
fn a_full_budget_is_refused_and_changes_nothing() {
    let mut cache = cache(3, 10_000);
    let (a, b) = (cache.open().unwrap(), cache.open().unwrap());
    append(&mut cache, &[(a, &tokens(PAGE + 1, 3))]).unwrap();
    let page = GEOMETRY.page_bytes();
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
    assert_eq!(content(&cache, a), expected(&tokens(PAGE + 1, 3)));
    // The room that is left can be used, and the room of a closed sequence again.
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
    assert_eq!(content(&cache, b), expected(&[1, 2]));
}

#[test]
fn spans_that_do_not_fit_are_refused() {
    let mut cache = cache(100, 50);
    let seq = cache.open().unwrap();
    append(&mut cache, &[(seq, &tokens(40, 0))]).unwrap();
    let reserve = |cache: &mut KvCache, position, rows| {
        cache
            .reserve(
                &ALL,
                &[Span {
                    seq,
                    position,
                    rows,
                }],
            )
            .unwrap_err()
    };
    let gap = |position| EngineError::PositionGap {
        seq,
        position,
        len: 40,
    };
    assert_eq!(reserve(&mut cache, 41, 1), gap(41));
    assert_eq!(reserve(&mut cache, 39, 1), gap(39));
    assert_eq!(reserve(&mut cache, 40, 0), EngineError::EmptySpan(seq));
    let full = |wanted| EngineError::ContextFull { wanted, limit: 50 };
    assert_eq!(reserve(&mut cache, 40, 11), full(51));
    assert_eq!(
        reserve(&mut cache, 40, u32::MAX),
        full(u64::from(u32::MAX) + 40)
    );
    let span = Span {
        seq,
        position: 40,
        rows: 1,
    };
    assert_eq!(
        cache.reserve(&ALL, &[span, span]),
        Err(EngineError::DuplicateSequence(seq))
    );
    assert_eq!(cache.truncate(seq, 41), Err(gap(41)));
    assert_eq!(cache.export(&WEIGHTS, seq, 41), Err(gap(41)));
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
    let snapshot = cache.export(&WEIGHTS, first, 0).unwrap();
    for _ in 1..12 {
        cache.open().unwrap();
    }
    let full = EngineError::TooManySequences(12);
    assert_eq!(cache.open(), Err(full.clone()));
    assert_eq!(cache.fork(first), Err(full.clone()));
    assert_eq!(cache.import(&WEIGHTS, &snapshot), Err(full.into()));
}

#[test]
fn freed_pages_come_back_as_zeros() {
    let mut cache = cache(2, 100);
    let a = cache.open().unwrap();
    append(&mut cache, &[(a, &tokens(2 * PAGE, 9))]).unwrap();
    cache.truncate(a, 3).unwrap();
    let b = cache.open().unwrap();
    let spans = [Span {
        seq: b,
        position: 0,
        rows: PAGE as u32,
    }];
    cache.reserve(&ALL, &spans).unwrap();
    cache.commit(&ALL, &spans);
    assert!(content(&cache, b).iter().all(|byte| *byte == 0));
}

#[test]
fn a_batch_that_failed_leaves_lengths_and_pages_as_they_were() {
    let mut cache = cache(9, 1000);
    let a = cache.open().unwrap();
    append(&mut cache, &[(a, &tokens(5, 2))]).unwrap();
    let before = cache.bytes_in_use();
    let spans = [Span {
        seq: a,
        position: 5,
        rows: 3 * PAGE as u32,
    }];
    cache.reserve(&ALL, &spans).unwrap();
    assert!(cache.bytes_in_use() > before);
    cache.roll_back(&spans);
    assert_eq!((cache.bytes_in_use(), cache.len(a)), (before, Ok(5)));
    assert_eq!(content(&cache, a), expected(&tokens(5, 2)));
}

fn snapshot(count: usize) -> Vec<u8> {
    let mut cache = cache(10, 1000);
    let a = cache.open().unwrap();
    if count > 0 {
        append(&mut cache, &[(a, &tokens(count, 5))]).unwrap();
    }
    cache
        .export(&WEIGHTS, a, count as u32)
        .unwrap()
        .into_bytes()
}

fn import(bytes: Vec<u8>) -> Result<(), ImportError> {
    let mut cache = cache(10, 100);
    let result = cache.import(&WEIGHTS, &KvSnapshot::from_bytes(bytes));
    if result.is_err() {
        assert_eq!((cache.bytes_in_use(), cache.sequences()), (0, 0));
    }
    result.map(|_| ())
}

#[test]
fn a_snapshot_of_something_else_is_refused_by_name() {
    let with = |offset: usize, bytes: &[u8]| {
        let mut snapshot = snapshot(3);
        snapshot[offset..offset + bytes.len()].copy_from_slice(bytes);
        import(snapshot)
    };
    assert_eq!(with(0, b"HNKV"), Ok(()));
    assert!(matches!(with(0, b"HNKW"), Err(ImportError::Malformed(_))));
    assert_eq!(
        with(4, &[2]),
        Err(ImportError::Version {
            found: 2,
            expected: 1
        })
    );
    assert!(matches!(with(6, &[2]), Err(ImportError::Malformed(_))));
    assert!(matches!(with(7, &[1]), Err(ImportError::Malformed(_))));
    assert_eq!(with(39, &[8]), Err(ImportError::Weights));
    let geometry = |field, found, expected| {
        Err(ImportError::Geometry {
            field,
            found,
            expected,
        })
    };
    let layers = |found| Err(ImportError::Layers { found, engine: ALL });
    assert_eq!(with(40, &[6]), layers(6..8));
    assert_eq!(with(40, &[4]), layers(4..6));
    assert_eq!(with(44, &[0]), layers(5..5));
    assert_eq!(with(44, &[255; 4]), layers(5..u32::MAX));
    assert!(matches!(with(44, &[1]), Err(ImportError::Length { .. })));
    assert_eq!(with(48, &[6]), geometry("KV heads", 6, 3));
    assert_eq!(with(52, &[2]), geometry("values per head", 2, 4));
    assert!(matches!(with(56, &[4]), Err(ImportError::Length { .. })));
    assert!(matches!(
        with(56, &[255; 4]),
        Err(ImportError::Length { .. })
    ));
    assert!(matches!(with(60, &[1]), Err(ImportError::Malformed(_))));
    assert_eq!(with(64, &[0, 0x7c]), Err(ImportError::NotFinite(64)));
    assert_eq!(with(70, &[1, 0xfe]), Err(ImportError::NotFinite(70)));
    assert_eq!(with(70, &[0xff, 0xfb]), Ok(()));
}

#[test]
fn a_snapshot_that_is_cut_or_too_long_is_refused() {
    let whole = snapshot(2);
    for len in 0..whole.len() {
        assert!(
            import(whole[..len].to_vec()).is_err(),
            "{len} bytes of {}",
            whole.len()
        );
    }
    let longer = [&whole[..], &[0]].concat();
    assert!(matches!(import(longer), Err(ImportError::Length { .. })));
}

#[test]
fn a_snapshot_beyond_the_context_or_the_budget_is_refused() {
    let context = ImportError::Engine(EngineError::ContextFull {
        wanted: 101,
        limit: 100,
    });
    assert_eq!(import(snapshot(101)), Err(context));
    let mut small = cache(1, 1000);
    let result = small.import(&WEIGHTS, &KvSnapshot::from_bytes(snapshot(PAGE + 1)));
    assert!(matches!(
        result,
        Err(ImportError::Engine(EngineError::KvFull { .. }))
    ));
    assert_eq!((small.bytes_in_use(), small.sequences()), (0, 0));
}

#[test]
fn a_sequence_stays_with_the_layers_that_it_ran_through() {
    let mut cache = cache(4, 100);
    let seq = cache.open().unwrap();
    let span = |position| {
        [Span {
            seq,
            position,
            rows: 2,
        }]
    };
    cache.reserve(&(6..7), &span(0)).unwrap();
    cache.commit(&(6..7), &span(0));
    let error = EngineError::OtherLayers {
        seq,
        ran: 6..7,
        asked: ALL,
    };
    assert_eq!(cache.reserve(&ALL, &span(2)), Err(error));
    let snapshot = cache.export(&WEIGHTS, seq, 2).unwrap();
    assert_eq!(
        snapshot.as_bytes().len() as u64,
        64 + 2 * GEOMETRY.position_bytes()
    );
    let copy = cache.import(&WEIGHTS, &snapshot).unwrap();
    let copied = [Span {
        seq: copy,
        position: 2,
        rows: 1,
    }];
    assert!(cache.reserve(&(5..6), &copied).is_err());
    cache.reserve(&(6..7), &copied).unwrap();
    cache.roll_back(&copied);
    cache.truncate(seq, 0).unwrap();
    cache.reserve(&ALL, &span(0)).unwrap();
}

#[derive(Clone, Debug)]
enum Op {
    Open,
    Append(Vec<(usize, usize)>),
    Truncate(usize, usize),
    Fork(usize),
    Close(usize),
    Carry(usize, usize),
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
        (which.clone(), 0..100usize).prop_map(|(seq, len)| Op::Carry(seq, len)),
        (which, 1..80usize).prop_map(|(seq, rows)| Op::Fail(seq, rows)),
    ]
}

/// Distinct pages that the sequences could need at most, and the least that they need.
fn check_pages(cache: &KvCache, model: &[(SeqId, Vec<u16>)]) -> TestCaseResult {
    let tables: std::collections::BTreeSet<usize> = cache
        .sequences
        .values()
        .flat_map(|s| s.pages.iter().copied())
        .collect();
    prop_assert_eq!(
        cache.pages.in_use(),
        tables.len(),
        "no page is lost or counted twice"
    );
    let most: usize = model
        .iter()
        .map(|(_, tokens)| tokens.len().div_ceil(PAGE))
        .sum();
    prop_assert!(tables.len() <= most);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_operations_agrees_with_lists_of_tokens(
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut cache = cache(14, 150);
        let mut other = super::tests::cache(14, 150);
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
                Op::Carry(index, len) => {
                    let (seq, tokens) = model[pick(index)].clone();
                    let len = len.min(tokens.len());
                    let snapshot = cache.export(&WEIGHTS, seq, len as u32).unwrap();
                    // Into another cache, whose content must be the same, and back into this one.
                    let there = other.import(&WEIGHTS, &snapshot).unwrap();
                    let back = other.export(&WEIGHTS, there, len as u32).unwrap();
                    other.close(there);
                    prop_assert_eq!(&back, &snapshot);
                    match cache.import(&WEIGHTS, &back) {
                        Ok(seq) => model.push((seq, tokens[..len].to_vec())),
                        Err(ImportError::Engine(
                            EngineError::KvFull { .. } | EngineError::TooManySequences { .. }
                        )) => {}
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                }
                Op::Fail(index, rows) => {
                    let (seq, tokens) = &model[pick(index)];
                    let spans = [Span {
                        seq: *seq,
                        position: tokens.len() as u32,
                        rows: rows as u32,
                    }];
                    if cache.reserve(&ALL, &spans).is_ok() {
                        cache.roll_back(&spans);
                    }
                }
            }
            for (seq, tokens) in &model {
                prop_assert_eq!(content(&cache, *seq), expected(tokens));
            }
            prop_assert_eq!(cache.sequences(), model.len());
            check_pages(&cache, &model)?;
        }
        for (seq, _) in model {
            cache.close(seq);
        }
        prop_assert_eq!(cache.bytes_in_use(), 0);
    }

    #[test]
    fn no_bytes_panic_the_importer(
        mut bytes in Just(snapshot(3)),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        len in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        for (index, value) in changes {
            let index = index.index(bytes.len());
            bytes[index] = value;
        }
        if cut {
            bytes.truncate(len.index(bytes.len() + 1));
        }
        let mut cache = cache(10, 100);
        if let Ok(seq) = cache.import(&WEIGHTS, &KvSnapshot::from_bytes(bytes.clone())) {
            prop_assert_eq!(cache.export(&WEIGHTS, seq, 3).unwrap().into_bytes(), bytes);
        }
    }
}
