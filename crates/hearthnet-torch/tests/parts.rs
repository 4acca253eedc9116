//! Parts of the libtorch engine: options, errors, and the choice of experts.
#![cfg(feature = "libtorch")]
#![allow(clippy::unwrap_used)]

#[path = "../src/forward/choose.rs"]
mod choose;

use choose::{Routed, choose};
use hearthnet_engine::EngineError;
use hearthnet_files::spec::ExpertSpec;
use hearthnet_torch::{DeviceChoice, Dtype, OptionError, TorchLoadError};
use tch::TchError;

#[test]
fn devices_and_formats_round_trip_as_text() {
    for text in ["auto", "cpu", "cuda:0", "cuda:3", "mps"] {
        assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
    }
    assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
    // The command line of the program accepts these (`hearthnet/src/cli/args/engine.rs`).
    for text in ["auto", "cpu", "cuda", "cuda:0", "cuda:127", "mps"] {
        assert!(text.parse::<DeviceChoice>().is_ok(), "{text}");
    }
    for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:128", "CPU"] {
        assert_eq!(text.parse::<DeviceChoice>(), Err(OptionError::Device));
    }
    for text in ["fp16", "bf16", "fp32"] {
        assert_eq!(text.parse::<Dtype>().unwrap().to_string(), text);
    }
    assert_eq!("f16".parse::<Dtype>(), Err(OptionError::Dtype));
}

#[test]
fn exhausted_memory_is_distinguished_from_other_failures() {
    let cases = [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", true),
        (
            "DefaultCPUAllocator: can't allocate memory: you tried",
            true,
        ),
        ("CUDA error: unspecified launch failure\nat c10", false),
    ];
    for (text, memory) in cases {
        let error = EngineError::from(TorchLoadError::from(TchError::Torch(text.to_owned())));
        assert_eq!(error == EngineError::DeviceMemory, memory, "{text}");
        assert!(!error.to_string().contains("c10"), "{error}");
    }
}

#[test]
fn an_excessive_allocation_is_out_of_memory() {
    let options = (tch::Kind::Float, tch::Device::Cpu);
    let error = tch::Tensor::f_empty([1 << 50], options).unwrap_err();
    assert_eq!(
        EngineError::from(TorchLoadError::from(error)),
        EngineError::DeviceMemory
    );
}

fn spec(used: u32, normalise: bool) -> ExpertSpec {
    ExpertSpec {
        count: 4,
        used,
        normalise,
        bias: false,
        shared: None,
        leading: None,
        sigmoid: false,
        correction: false,
        groups: None,
        scale: None,
        norms: false,
    }
}

fn experts(scores: &[f32; 4], used: u32) -> Vec<usize> {
    choose(scores, &spec(used, true)).into_keys().collect()
}

#[test]
fn rows_go_to_the_best_experts_the_lower_number_where_they_tie_and_nan_last() {
    assert_eq!(experts(&[1.0, 3.0, 2.0, 0.0], 2), [1, 2]);
    assert_eq!(experts(&[2.0, 5.0, 2.0, 5.0], 3), [0, 1, 3]);
    assert_eq!(experts(&[-0.0, 0.0, -1.0, -2.0], 1), [0]);
    assert_eq!(experts(&[f32::NAN, -5.0, f32::NAN, -6.0], 3), [0, 1, 3]);
}

#[test]
fn weights_are_parts_of_the_softmax_of_all_scores_or_of_those_chosen() {
    let scores = [0.0, 0.0, f32::ln(2.0), f32::NEG_INFINITY];
    let of = |normalise| {
        let chosen = choose(&scores, &spec(2, normalise));
        let weight = |routed: &Routed| routed.weights[0];
        chosen.values().map(weight).collect::<Vec<f32>>()
    };
    for (normalise, expected) in [(true, [1.0 / 3.0, 2.0 / 3.0]), (false, [0.25, 0.5])] {
        let found = of(normalise);
        let close = found
            .iter()
            .zip(expected)
            .all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(close && found.len() == 2, "{found:?}");
    }
}
