use hearthnet_engine::{EngineOptions, Span};
use hearthnet_files::ModelFile;
use hearthnet_testkit::{FullModel, families, family};
use hearthnet_tokens::{Special, Tokenizer};

use super::*;
use crate::tests::tiny_file;

fn of_host(
    host: u8,
    dtype: BoundaryDtype,
    band: Option<Band>,
    seen: Arc<Mutex<SeenRows>>,
) -> BoundaryCheck {
    BoundaryCheck::new((4, dtype, band), seen, host, (WeightsId([0; 32]), 0, 3))
}

fn none_seen() -> Arc<Mutex<SeenRows>> {
    Arc::default()
}

fn encode(rows: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    BoundaryDtype::F16.encode(rows, &mut bytes);
    bytes
}

fn check(band: Option<Band>, position: u32, rows: &[f32]) -> Result<(), CheckError> {
    let mut check = of_host(0, BoundaryDtype::F16, band, none_seen());
    check.check(position, (rows.len() / 4) as u32, &[], &encode(rows))
}

const BAND: Band = Band { lo: 0.5, hi: 5.0 };

#[test]
fn honest_rows_pass_and_so_do_attention_sinks() {
    let plain = [1.0, -1.0, 2.0, 0.0];
    let sink = [1.0, -20_000.0, 2.0, 0.5];
    check(Some(BAND), 0, &[sink, plain].concat()).unwrap();
    // A hundred times too large.
    let large = check(Some(BAND), 0, &[100.0; 4]);
    assert_eq!(large.unwrap_err().code(), "tensor_band");
}

#[test]
fn nan_and_infinity_are_found_wherever_they_stand() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in 0..8 {
            let mut rows = [1.0f32; 8];
            rows[at] = bad;
            let found = CheckError::NonFinite(7 + (at / 4) as u32);
            assert_eq!(check(None, 7, &rows), Err(found));
        }
    }
}

#[test]
fn zeros_never_pass() {
    for band in [None, Some(BAND)] {
        let zeros = check(band, 3, &[0.0; 4]);
        assert_eq!(zeros.unwrap_err().code(), "tensor_band");
    }
}

#[test]
fn a_row_that_comes_back_as_it_was_sent_is_refused_in_any_place() {
    let sent = encoded(&[1.0, 1.5, 2.0]);
    let mut c = remembering(&none_seen());
    for lie in 0..3 {
        let mut rows = [1.25, 1.75, 2.25];
        assert_eq!(c.check(7, 3, &sent, &encoded(&rows)), Ok(()));
        rows[lie] = 1.0 + 0.5 * lie as f32;
        let position = 7 + lie as u32;
        let error = c.check(7, 3, &sent, &encoded(&rows)).unwrap_err();
        assert_eq!(error, CheckError::Unchanged(position));
        assert_eq!(error.code(), "tensor_band");
    }
    // Only the last row was requested: it answers the last sent row only.
    let mut last = |returned: &[u8]| c.check(9, 1, &sent, returned);
    assert_eq!(last(&encoded(&[2.0])), Err(CheckError::Unchanged(9)));
    assert_eq!(last(&encoded(&[1.0])), Ok(()));
    // A single different value is enough; extra rows match no sent row.
    assert_eq!(last(&encode(&[2.0, -2.0, 2.0, 1.5])), Ok(()));
    assert_eq!(c.check(7, 4, &sent, &encoded(&[1.0; 4])), Ok(()));
}

/// Rows with these first values.
fn encoded(rows: &[f32]) -> Vec<u8> {
    let rows: Vec<f32> = rows.iter().flat_map(|x| [*x, -x, 2.0, 1.0]).collect();
    encode(&rows)
}

fn remembering(seen: &Arc<Mutex<SeenRows>>) -> BoundaryCheck {
    of_host(0, BoundaryDtype::F16, Some(BAND), Arc::clone(seen))
}

#[test]
fn yesterdays_rows_for_other_rows_are_refused_in_this_stream_and_in_any_other() {
    let seen = none_seen();
    let mut yesterday = remembering(&seen);
    let (sent, returned) = (encoded(&[1.0, 1.5]), encoded(&[3.0, 3.5]));
    assert_eq!(yesterday.check(0, 2, &sent, &returned), Ok(()));
    for mut check in [yesterday, remembering(&seen)] {
        // A replay, and the beginning of another conversation.
        assert_eq!(check.check(0, 2, &sent, &returned), Ok(()));
        for again in [3.0, 3.5] {
            let error = check.check(9, 1, &encoded(&[2.0]), &encoded(&[again]));
            assert_eq!(error, Err(CheckError::Repeated(9)));
            assert_eq!(error.unwrap_err().code(), "tensor_band");
        }
        // The same row may have another output behind other rows, or the same by chance.
        for other in [4.0, 3.0] {
            let checked = check.check(9, 1, &encoded(&[1.0]), &encoded(&[other]));
            assert_eq!(checked, Ok(()));
        }
    }
    // Another host may honestly return the same rows.
    let mut other = of_host(1, BoundaryDtype::F16, Some(BAND), seen);
    let (sent, returned) = (encoded(&[2.0]), encoded(&[3.0]));
    assert_eq!(other.check(0, 1, &sent, &returned), Ok(()));
}

#[test]
fn one_row_in_several_places_of_a_piece_is_refused_unless_the_piece_says_the_same_again() {
    let seen = none_seen();
    let mut check = remembering(&seen);
    let mut piece = |sent: [f32; 3], returned: [f32; 3]| {
        check.check(4, 3, &encoded(&sent), &encoded(&returned))
    };
    let error = piece([1.0, 1.5, 2.5], [3.0, 3.5, 3.0]);
    assert_eq!(error, Err(CheckError::Repeated(6)));
    assert_eq!(piece([0.5; 3], [4.0; 3]), Ok(()));
}

#[test]
fn only_so_many_rows_are_remembered_the_latest_ones() {
    let mut seen = SeenRows::default();
    for n in 0..2 * SEEN as u32 {
        assert!(seen.note(0, &n.to_le_bytes(), &(n + 1).to_le_bytes()));
    }
    assert_eq!((seen.rows.len(), seen.order.len()), (SEEN, SEEN));
    let (first, last) = (1u32.to_le_bytes(), (2 * SEEN as u32).to_le_bytes());
    assert!(!seen.note(0, &first, &last));
    assert!(seen.note(0, &last, &first), "forgotten");
}

#[test]
fn bytes_that_are_not_whole_rows_are_refused() {
    let mut c = of_host(0, BoundaryDtype::F16, None, none_seen());
    for (rows, bytes) in [(1, 7), (1, 9), (2, 8), (u32::MAX, 8), (0, 8)] {
        assert_eq!(
            c.check(0, rows, &[], &vec![1; bytes]).unwrap_err().code(),
            "tensor_shape"
        );
    }
}

#[test]
fn huge_fp32_rows_are_not_mistaken_for_nan() {
    let mut bytes = Vec::new();
    BoundaryDtype::F32.encode(&[1e30f32; 4], &mut bytes);
    let mut c = of_host(0, BoundaryDtype::F32, None, none_seen());
    assert_eq!(c.check(0, 1, &[], &bytes), Ok(()));
}

/// Rows at every boundary of a model, the embeddings first.
fn boundaries(file: &ModelFile, ids: &[u32]) -> Vec<Vec<f32>> {
    let options = EngineOptions::default();
    let mut whole = FullModel::load(file, &options, &mut |_, _| ()).unwrap();
    let mut rows = Vec::new();
    whole.head().embed(ids, &mut rows).unwrap();
    let mut all = vec![rows.clone()];
    for layer in 0..file.spec().layers {
        let seq = whole.engine_mut().open().unwrap();
        let span = Span {
            seq,
            position: 0,
            rows: ids.len() as u32,
        };
        let layers = layer..layer + 1;
        let ran = whole
            .engine_mut()
            .forward_layers(layers, &[span], &mut rows);
        ran.unwrap();
        whole.engine_mut().close(seq);
        all.push(rows.clone());
    }
    all
}

/// Callback for a chunk: first layer of the span, end of its layers, sent and returned rows.
type Each<'a> = dyn FnMut(u32, u32, &[f32], &[f32]) + 'a;

/// Calls `each` for the chunks of all spans behind the second layer.
fn pieces(file: &ModelFile, ids: &[u32], each: &mut Each<'_>) {
    let all = boundaries(file, ids);
    let width = file.spec().width as usize;
    for lo in FROM_LAYER..file.spec().layers {
        for hi in lo + 1..=file.spec().layers {
            let (sent, returned) = (&all[lo as usize], &all[hi as usize]);
            for rows in [8, 24] {
                let sent = sent.chunks_exact(rows * width);
                for (sent, returned) in sent.zip(returned.chunks_exact(rows * width)) {
                    each(lo, hi, sent, returned);
                }
            }
        }
    }
}

fn reversed(rows: &[f32], width: usize) -> Vec<f32> {
    rows.rchunks(width).flatten().copied().collect()
}

fn smollm2() -> (ModelFile, Tokenizer, Vec<u32>) {
    let file = ModelFile::open(&hearthnet_testkit::smollm2()).unwrap();
    let tokenizer = Tokenizer::from_gguf(file.gguf()).unwrap();
    let text = include_str!("../../../../crates/hearthnet-engine/examples/leakage/texts.txt");
    let text = tokenizer.encode_document(text, Special::Plain).unwrap();
    (file, tokenizer, text)
}

#[test]
fn honest_rows_of_every_family_keep_their_places_and_reversed_ones_are_found() {
    let all = families().into_iter().map(|name| {
        let file = family(&name);
        (name, file)
    });
    let (mut models, mut count) = (0, 0);
    for (name, file) in all.chain([("llama".to_owned(), tiny_file(8))]) {
        let (width, vocab) = (file.spec().width as usize, u64::from(file.spec().vocab));
        // `boundaries` has no per-layer embeddings, and encoders compute on one machine only.
        let values = file.spec().row_values(&(0..file.spec().layers));
        if file.spec().encoder.is_some() || values != width {
            continue;
        }
        let mut random = 12_345_u64;
        let mut word = || {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            ((random >> 33) % vocab) as u32
        };
        // Random words; one repeated word; two alternating words.
        let texts = [
            (0..192).map(|_| word()).collect::<Vec<u32>>(),
            vec![word(); 48],
            [word(), word()].repeat(24),
        ];
        for (nth, ids) in texts.iter().enumerate() {
            pieces(&file, ids, &mut |lo, hi, sent, returned| {
                assert_eq!(
                    permuted(sent, returned, width),
                    None,
                    "{name}, {lo} to {hi}"
                );
                if nth == 0 {
                    let found = permuted(sent, &reversed(returned, width), width);
                    assert!(found.is_some(), "{name}, {lo} to {hi}");
                }
                count += 1;
            });
        }
        models += usize::from(file.spec().layers > FROM_LAYER);
    }
    assert!(
        models >= 3 && count > 300,
        "{models} models, {count} pieces"
    );
}

#[test]
fn the_real_models_rows_keep_their_places_and_reversed_ones_are_found_through_a_few_layers() {
    let (file, tokenizer, text) = smollm2();
    let width = file.spec().width as usize;
    // Repeated text, and random keystrokes.
    let again = tokenizer.encode("the cat and the dog and ", Special::Plain);
    let again = again.unwrap().repeat(16);
    let one = vec![again[0]; 96];
    let (mut few, mut found) = (0, 0);
    for ids in [&text, &again, &one] {
        pieces(&file, ids, &mut |lo, hi, sent, returned| {
            assert_eq!(permuted(sent, returned, width), None, "{lo} to {hi}");
            if hi - lo <= 6 && ids == &text {
                few += 1;
                found += usize::from(permuted(sent, &reversed(returned, width), width).is_some());
            }
        });
    }
    assert!(found * 100 >= few * 99, "{found} of {few} reversed pieces");
}

#[test]
fn two_rows_in_each_others_places_are_found_where_few_layers_were_between() {
    let (file, _, text) = smollm2();
    let width = file.spec().width as usize;
    let (mut all, mut found) = (0, 0);
    pieces(&file, &text, &mut |lo, hi, sent, returned| {
        if hi - lo <= 2 {
            let mut swapped = returned.to_vec();
            let (before, behind) = swapped.split_at_mut(5 * width);
            before[width..2 * width].swap_with_slice(&mut behind[..width]);
            all += 1;
            found += usize::from(permuted(sent, &swapped, width).is_some());
        }
    });
    assert!(2 * found > all, "{found} of {all} swapped pairs");
}
