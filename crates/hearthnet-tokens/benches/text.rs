//! Benchmarks of text processing with the real model:
//! `cargo bench -p hearthnet-tokens --bench text`.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use hearthnet_files::gguf::Gguf;
use hearthnet_files::sampling::SamplerConfig;
use hearthnet_files::tokenizer_parts::TokenizerParts;
use hearthnet_tokens::{ChatMessage, ChatTemplate, Detokenizer, Sampler, Special, Tokenizer};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Minimum time of several runs: the least disturbed one.
fn best<T>(runs: usize, mut work: impl FnMut() -> T) -> Duration {
    let time = || {
        let start = Instant::now();
        black_box(work());
        start.elapsed()
    };
    std::iter::repeat_with(time).take(runs).min().unwrap()
}

fn main() {
    let gguf = Gguf::open(&hearthnet_testkit::smollm2()).unwrap();
    let load = best(10, || Tokenizer::from_gguf(&gguf).unwrap());
    println!("tokenizer: load                     {load:>10.1?}");

    let parts = best(10, || TokenizerParts::from_gguf(&gguf).unwrap());
    println!("tokenizer: reading the metadata     {parts:>10.1?}");
    let whole = TokenizerParts::from_gguf(&gguf).unwrap();
    let small = TokenizerParts {
        model: whole.model,
        pre: whole.pre,
        tokens: vec!["a"],
        ..TokenizerParts::default()
    };
    let rules = best(10, || Tokenizer::new(&small).unwrap());
    println!("tokenizer: load without vocabulary  {rules:>10.1?}");

    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    let template = ChatTemplate::from_gguf(&gguf).unwrap();
    let text = include_str!("../src/tokenizer/mod.rs").repeat(4);
    let ids = tokenizer.encode(&text, Special::Plain).unwrap();
    let cold = best(5, || {
        let fresh = Tokenizer::from_gguf(&gguf).unwrap();
        let start = Instant::now();
        black_box(fresh.encode(&text, Special::Plain).unwrap());
        start.elapsed()
    });
    println!("tokenizer: (load and cold encode    {cold:>10.1?})");
    let warm = best(10, || tokenizer.encode(&text, Special::Plain).unwrap());
    println!(
        "tokenizer: encode                   {:>7.1} MB/s, {:.2} million tokens/s",
        text.len() as f64 / warm.as_secs_f64() / 1e6,
        ids.len() as f64 / warm.as_secs_f64() / 1e6,
    );
    let decode = best(10, || {
        let mut detokenizer = Detokenizer::new(&tokenizer);
        ids.iter()
            .map(|id| detokenizer.push(*id).len())
            .sum::<usize>()
    });
    println!(
        "detokenizer: per token              {:>10.1?}",
        decode / ids.len() as u32
    );
    let messages = [ChatMessage::user("What is the capital of France?")];
    let prompt = best(20, || {
        template.prompt_ids(&tokenizer, &messages, true).unwrap()
    });
    println!("template: prompt of one question    {prompt:>10.1?}");

    for vocab in [49_152_u32, 151_936] {
        // Bell-shaped like logits: sums of a simple generator's output.
        let mut state = 1_u32;
        let mut uniform = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(state >> 8) / f64::from(1 << 24)
        };
        let logits: Vec<f32> = (0..vocab)
            .map(|_| ((0..12).map(|_| uniform()).sum::<f64>() * 3.0 - 18.0) as f32)
            .collect();
        let cases: [(&str, f32, fn(&mut SamplerConfig)); 8] = [
            ("greedy", 0.0, |_| {}),
            ("greedy, penalties", 0.0, |c| c.repetition_penalty = 1.1),
            ("greedy, 5 log probabilities", 0.0, |c| c.logprobs = Some(5)),
            ("top-k 40, top-p 0.95", 0.8, |c| {
                (c.top_k, c.top_p) = (40, 0.95);
            }),
            ("top-p 0.95", 0.8, |c| c.top_p = 0.95),
            ("top-p 0.5", 0.8, |c| c.top_p = 0.5),
            ("min-p 0.05", 0.8, |c| c.min_p = 0.05),
            ("temperature only", 0.8, |_| {}),
        ];
        for (name, temperature, change) in cases {
            let mut config = SamplerConfig {
                temperature,
                seed: Some(1),
                ..SamplerConfig::default()
            };
            change(&mut config);
            let mut sampler = Sampler::new(config).unwrap();
            let time = best(50, || sampler.sample(&logits).unwrap());
            println!("sampler: {vocab:>6}, {name:<27}{time:>10.1?}");
        }
    }
}
