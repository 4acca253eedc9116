//! `hearthnet adversarial calibrate`: measures the magnitudes of the rows after every layer of a model,
//! and makes a file with its bands (`boundary_magnitude` in `config/models.toml`).
//!
//! The measure is the median magnitude of a row's values. The root mean square is unsuitable:
//! models park attention on the first position and a few unusual tokens by making one or two values
//! of a row huge (RMS 1000 where others have 10), and these rows cannot be predicted. The median
//! ignores such values, so one band holds for all rows. It still changes with the row when a host
//! returns zeros or a wrong scale.
//!
//! The inputs are texts of many kinds, chats with the model's own answers, random and repeated
//! tokens, and every 16th token as a first row. A band is the observed range, widened by a margin on
//! both sides.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use hearthnet_engine::{EngineOptions, Span};
use hearthnet_files::ModelFile;
use hearthnet_files::magnitude::{Band, magnitude};
use hearthnet_testkit::FullModel;
use hearthnet_tokens::{ChatMessage, ChatTemplate, Special, Tokenizer};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::lies::Random;
use crate::{HarnessError, Result};

/// Longest sequence, in tokens.
const LONGEST: usize = 1024;
/// Tokens of the model's answer in a chat.
const ANSWER: usize = 96;
/// Step between the tokens that are measured as first rows.
const FIRST_STEP: usize = 16;
/// Sequences of one row per batch.
const TOGETHER: usize = 64;

const QUESTIONS: [&str; 12] = [
    "Why do people gather around a hearth? Answer in three sentences.",
    "What is the capital of France?",
    "Write a poem about the sea.",
    "Explain photosynthesis to a child of six.",
    "def fibonacci(n):\n    # complete this function",
    "List ten countries with their populations as a table.",
    "Translate to German: Good morning, how did you sleep?",
    "1 + 1 =",
    "hi",
    "Tell me a story about a dragon who was afraid of fire, with dialogue.",
    "用一句话介绍北京。",
    "Summarise: The quick brown fox jumps over the lazy dog. The dog does not mind.",
];

const SNIPPETS: [&str; 14] = [
    "今天天气很好，我们去公园散步吧。孩子们在湖边喂鸭子，老人们在树下下棋。",
    "東京は日本の首都です。桜の季節には、多くの人が上野公園に集まります。",
    "한국어 문장도 여기에 있습니다. 내일은 비가 올 것 같으니 우산을 가져가세요.",
    "В начале было слово, и слово было у всех на устах; потом наступила тишина.",
    "كان يا ما كان في قديم الزمان، رجل يعيش في قرية صغيرة بجانب البحر.",
    "Longtemps, je me suis couché de bonne heure. À peine ma bougie éteinte, je dormais.",
    "😀🎉🚀👩‍👩‍👧‍👦🔥❤️🇫🇷👍🏽",
    "3.14159265358979, 2.71828, 1/137, 0x7fff, 1e-9, 192.168.0.1; ",
    "THIS IS NOT A DRILL. PROCEED TO THE NEAREST EXIT. DO NOT RUN. ",
    "<div class=\"a\"><p>Hello&nbsp;<b>world</b></p><!-- nothing --></div>\n",
    "| a | b | c |\n|---|---|---|\n| 1 | 2 | 3 |\n",
    "    \t\t   \n\n\n      \n \n",
    "!!!???...;;;---===+++***///\\\\\\###@@@%%%",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z ",
];

const FILES: [&str; 5] = [
    include_str!("../../../crates/hearthnet-engine/tests/data/parity/text.txt"),
    include_str!("../../../crates/hearthnet-engine/src/lib.rs"),
    include_str!("../../../crates/hearthnet-engine/tests/data/parity/reference.py"),
    include_str!("../../../crates/hearthnet-engine/tests/data/parity/README.md"),
    include_str!("../../../Cargo.toml"),
];

struct Model {
    whole: FullModel,
    layers: usize,
    width: usize,
    /// Longest sequence.
    longest: usize,
}

impl Model {
    fn open(file: &ModelFile) -> Result<Self> {
        Ok(Self {
            whole: FullModel::load(file, &EngineOptions::default(), &mut |_, _| ())?,
            layers: file.spec().layers as usize,
            width: width(file)?,
            longest: LONGEST.min(file.spec().context as usize),
        })
    }

    /// Magnitude of every row of `sequences` after every layer: `[layer][row]`, all rows in
    /// sequence.
    fn measure(&mut self, sequences: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        let mut x = Vec::new();
        self.whole.head().embed(&sequences.concat(), &mut x)?;
        let engine = self.whole.engine_mut();
        let mut measured = Vec::with_capacity(self.layers);
        for layer in 0..self.layers as u32 {
            let mut spans = Vec::with_capacity(sequences.len());
            for ids in sequences {
                spans.push(Span::new(engine.open()?, 0, ids.len() as u32));
            }
            engine.forward_layers(layer..layer + 1, &spans, &mut x)?;
            for span in &spans {
                engine.close(span.seq);
            }
            measured.push(x.chunks_exact(self.width).map(magnitude).collect());
        }
        Ok(measured)
    }

    /// Likeliest continuation, up to the end of the model's answer.
    fn answer(&mut self, tokenizer: &Tokenizer, mut ids: Vec<u32>) -> Result<Vec<u32>> {
        ids.truncate(self.longest);
        let seq = self.whole.engine_mut().open()?;
        let (mut new, mut logits) = (ids.clone(), Vec::new());
        for _ in 0..ANSWER {
            self.whole.append(seq, &new, &mut logits)?;
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            let Some(best) = best.map(|best| best as u32) else {
                break;
            };
            if tokenizer.is_end_of_generation(best) || ids.len() >= self.longest {
                break;
            }
            ids.push(best);
            new = vec![best];
        }
        self.whole.engine_mut().close(seq);
        Ok(ids)
    }
}

/// Values of a row between layers.
///
/// # Errors
/// If rows carry more than the residual stream.
pub(super) fn width(file: &ModelFile) -> Result<usize> {
    let spec = file.spec();
    let width = spec.width as usize;
    match spec.row_values(&(0..spec.layers)) == width {
        true => Ok(width),
        false => Err(HarnessError::usage(
            "rows of this model carry inputs of each layer beside the residual stream, whose \
             magnitude has no band",
        )),
    }
}

/// Texts of many kinds as tokens.
fn sequences(model: &mut Model, file: &ModelFile) -> Result<Vec<Vec<u32>>> {
    let tokenizer = Tokenizer::from_gguf(file.gguf())?;
    // A model without a template has no chats.
    let template = ChatTemplate::from_gguf(file.gguf()).ok();
    let (mut all, longest) = (Vec::new(), model.longest);
    let mut add = |mut ids: Vec<u32>| {
        ids.truncate(longest);
        all.push(ids);
    };
    for text in FILES {
        let ids = tokenizer.encode_document(text, Special::Plain)?;
        for window in ids.chunks(longest).take(3) {
            add(window.to_vec());
        }
    }
    for text in SNIPPETS {
        add(tokenizer.encode_document(text, Special::Plain)?);
        let longer = tokenizer.encode_document(&text.repeat(20), Special::Plain)?;
        add(longer);
    }
    for (template, question) in template.iter().flat_map(|it| QUESTIONS.map(|q| (it, q))) {
        let mut messages = vec![ChatMessage::user(question)];
        let prompt = template.prompt_ids(&tokenizer, &messages, true)?;
        let first = model.answer(&tokenizer, prompt.clone())?;
        let answer = tokenizer.decode(first.get(prompt.len()..).unwrap_or_default());
        messages.push(ChatMessage::assistant(answer));
        messages.push(ChatMessage::user("Say that again, but shorter."));
        let prompt = template.prompt_ids(&tokenizer, &messages, true)?;
        add(model.answer(&tokenizer, prompt)?);
    }
    // Repeated beginnings, each with a continuation.
    let vocab = file.spec().vocab;
    let mut random = Random::new(1);
    let mut token = || random.below(vocab as usize) as u32;
    for _ in 0..16 {
        add((0..256).map(|_| token()).collect());
    }
    for _ in 0..64 {
        add((0..24).map(|_| token()).collect());
    }
    for repeats in [2, 3, 5, 8, 16, 40] {
        for _ in 0..16 {
            let mut ids = vec![token(); repeats];
            ids.extend((0..12).map(|_| token()));
            add(ids);
        }
        for _ in 0..8 {
            add([token(), token()].repeat(repeats));
            add([token(), token(), token()].repeat(repeats));
        }
    }
    let special: Vec<u32> = (0..vocab)
        .filter(|&id| tokenizer.token_bytes(id).is_none_or(<[u8]>::is_empty))
        .take(24)
        .chain([0, 1, 2])
        .collect();
    add(special.clone());
    for &id in &special {
        add(vec![id, id, token(), id, token(), token()]);
    }
    Ok(all)
}

/// Widens the observed range, and rounds it outward to three digits.
fn widen(seen: &[f32], margin: f32) -> (f32, f32) {
    let unit = |v: f32| 10f32.powf(v.log10().floor() - 2.0);
    let (lo, hi) = (seen[0] / margin, seen[seen.len() - 1] * margin);
    (
        (lo / unit(lo)).floor() * unit(lo),
        (hi / unit(hi)).ceil() * unit(hi),
    )
}

/// Three digits, without the noise of binary fractions.
fn short(value: f32) -> String {
    let decimals = (2.0 - value.log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{value:.decimals$}")
}

/// Bands of a model's rows: one for the output of each layer.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bands {
    /// Identity of the weights.
    weights: String,
    /// Format of the rows between layers.
    boundary: String,
    /// Measured rows of each layer.
    pub rows: u64,
    pub margin: f32,
    pub boundary_magnitude: Vec<Band>,
}

impl Bands {
    /// Reads a file of bands. `pin` is the SHA-256 of its bytes, as `calibrate` prints it.
    ///
    /// # Errors
    /// If the file cannot be read, is another one than was pinned, or holds the bands of another
    /// model.
    pub fn read(path: &Path, pin: Option<&str>, model: &ModelFile) -> Result<Bands> {
        let text = fs::read_to_string(path)?;
        let (hash, shown) = (hash_of(&text), path.display());
        if let Some(pin) = pin.filter(|pin| !pin.eq_ignore_ascii_case(&hash)) {
            return Err(HarnessError::usage(format!(
                "{shown} is not the file of bands that was pinned: its SHA-256 is {hash}, not {pin}"
            )));
        }
        let bands: Bands = toml::from_str(&text)?;
        let (weights, boundary) = of_model(model);
        if (&bands.weights, bands.boundary.as_str()) != (&weights, boundary) {
            return Err(HarnessError::usage(format!(
                "{shown} holds the bands of other weights or of another boundary format; this \
                 model's are {weights}, {boundary}: run `hearthnet adversarial calibrate` on it"
            )));
        }
        Ok(bands)
    }
}

/// SHA-256 of a file of bands.
pub fn hash_of(text: &str) -> String {
    hex::encode(Sha256::digest(text))
}

/// Identity of the weights, and the format of the rows between layers.
fn of_model(file: &ModelFile) -> (String, &'static str) {
    let weights = file.manifest(&mut |_, _| {}).weights_id();
    (weights.to_string(), file.spec().boundary.descriptor_name())
}

/// Measures the bands of a model. Returns the text of their file.
///
/// # Errors
/// If the model cannot be run.
pub fn calibrate(
    path: &Path,
    margin: f32,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<String> {
    let file = ModelFile::open(path)?;
    let seen = observed(&file, progress)?;
    Ok(text(&file, &seen, margin))
}

/// Bands of a model, one for the output of each layer.
pub(crate) fn measured_bands(file: &ModelFile, margin: f32) -> Result<Vec<Band>> {
    let seen = observed(file, &mut |_, _| {})?;
    let band = |seen: &Vec<f32>| {
        let (lo, hi) = widen(seen, margin);
        Band { lo, hi }
    };
    Ok(seen.iter().map(band).collect())
}

/// All observed magnitudes, by layer, in order.
fn observed(file: &ModelFile, progress: &mut dyn FnMut(usize, usize)) -> Result<Vec<Vec<f32>>> {
    let mut model = Model::open(file)?;
    let mut seen: Vec<Vec<f32>> = vec![Vec::new(); model.layers];
    let mut add = |measured: Vec<Vec<f32>>| {
        for (seen, rows) in seen.iter_mut().zip(measured) {
            seen.extend(rows);
        }
    };
    let first: Vec<u32> = (0..file.spec().vocab).step_by(FIRST_STEP).collect();
    let sequences = sequences(&mut model, file)?;
    let batches = first.len().div_ceil(TOGETHER);
    let total = batches + sequences.len();
    for (done, tokens) in first.chunks(TOGETHER).enumerate() {
        progress(done, total);
        let sequences: Vec<&[u32]> = tokens.chunks(1).collect();
        add(model.measure(&sequences)?);
    }
    for (done, ids) in sequences.iter().enumerate() {
        progress(batches + done, total);
        add(model.measure(&[ids])?);
    }
    for seen in &mut seen {
        seen.sort_by(f32::total_cmp);
    }
    Ok(seen)
}

/// Text of the file of bands, with what the bands find.
fn text(file: &ModelFile, seen: &[Vec<f32>], margin: f32) -> String {
    let bands: Vec<(f32, f32)> = seen.iter().map(|seen| widen(seen, margin)).collect();
    // Detection rates in percent: of rows scaled by a factor, and of rows that a host of some
    // layers returns unchanged.
    let caught = |from: usize, scale: f32, to: usize| {
        let (lo, hi) = bands[to];
        let rows = &seen[from];
        let outside = rows.iter().filter(|&&v| v * scale < lo || v * scale > hi);
        100.0 * outside.count() as f64 / rows.len() as f64
    };
    let (weights, boundary) = of_model(file);
    let mut text = String::from(
        "# Bands of the rows after each layer, by `hearthnet adversarial calibrate`.\n\
         # layer      seen             x100   unchanged by 5, 10, 15 layers\n",
    );
    for (layer, rows) in seen.iter().enumerate() {
        let unchanged = [5, 10, 15].map(|layers| match layer.checked_sub(layers) {
            Some(from) => format!("{:>6.1}%", caught(from, 1.0, layer)),
            None => "      -".to_owned(),
        });
        let _ = writeln!(
            text,
            "# {layer:>5}  {:>7.3} {:>7.3}  {:>7.2}%  {}",
            rows[0],
            rows[rows.len() - 1],
            caught(layer, 100.0, layer),
            unchanged.join(" "),
        );
    }
    let _ = writeln!(
        text,
        "weights = \"{weights}\"\nboundary = \"{boundary}\"\nrows = {}\nmargin = {margin:?}\n\
         boundary_magnitude = [",
        seen[0].len()
    );
    for chunk in bands.chunks(5) {
        let pairs = chunk
            .iter()
            .map(|&(lo, hi)| format!("[{}, {}]", short(lo), short(hi)));
        let _ = writeln!(text, "    {},", pairs.collect::<Vec<_>>().join(", "));
    }
    text + "]\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearthnet_testkit::TinyLlama;

    #[test]
    fn a_calibrated_file_is_read_for_its_model_and_its_hash_only() {
        let folder = tempfile::tempdir().unwrap();
        let model = TinyLlama::default().write(folder.path());
        let mut steps = 0;
        let text = calibrate(&model, 1.5, &mut |_, _| steps += 1).unwrap();
        assert!(steps > 100);
        let path = folder.path().join("bands.toml");
        fs::write(&path, &text).unwrap();
        let (file, hash) = (ModelFile::open(&model).unwrap(), hash_of(&text));
        let bands = Bands::read(&path, Some(&hash), &file).unwrap();
        assert_eq!(bands.boundary_magnitude.len(), 2);
        assert!(bands.rows > 5_000 && bands.margin == 1.5);
        for band in &bands.boundary_magnitude {
            assert!(0.0 < band.lo && band.lo * 2.0 < band.hi);
        }

        fs::write(&path, text.replace("rows = ", "# \nrows = ")).unwrap();
        let error = Bands::read(&path, Some(&hash), &file).unwrap_err();
        assert!(error.to_string().contains("pinned"), "{error}");
        Bands::read(&path, None, &file).unwrap();
        let other = TinyLlama {
            seed: 2,
            ..TinyLlama::default()
        };
        let error = Bands::read(&path, None, &other.file()).unwrap_err();
        assert!(error.to_string().contains("other weights"), "{error}");
    }
}
