// Quantises a model with llama.cpp, and runs the result, see README.md.
//
// usage: quantise MODEL.gguf ARCHITECTURE VOCABULARY FTYPE QUANTISED.gguf WINDOW ATTENTION_FACTOR < IDS > LOGITS
//
// FTYPE is a number of llama_ftype; the last two are 0 if the model needs no workaround. LOGITS are
// those of every row, f32 in this machine's byte order.
#include "llama.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

static void require(bool holds, const char * what) {
    if (!holds) {
        std::cerr << "not " << what << "\n";
        exit(1);
    }
}

int main(int, char ** argv) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    const std::string architecture = argv[2];
    const int window = atoi(argv[6]);
    const double factor = atof(argv[7]);
    // These models have no vocabulary, and llama.cpp requires a key that says so.
    llama_model_kv_override known[4] = {};
    known[0].tag = LLAMA_KV_OVERRIDE_TYPE_STR;
    strcpy(known[0].key, "tokenizer.ggml.model");
    strcpy(known[0].val_str, "none");
    known[1].tag = LLAMA_KV_OVERRIDE_TYPE_INT;
    strcpy(known[1].key, (architecture + ".vocab_size").c_str());
    known[1].val_i64 = atoi(argv[3]);
    if (factor != 0) {
        known[2].tag = LLAMA_KV_OVERRIDE_TYPE_FLOAT;
        strcpy(known[2].key, (architecture + ".rope.scaling.attn_factor").c_str());
        known[2].val_f64 = factor;
    }

    auto quantise = llama_model_quantize_default_params();
    quantise.nthread = 1;
    quantise.ftype = llama_ftype(atoi(argv[4]));
    quantise.pure = true;
    quantise.kv_overrides = known;
    require(llama_model_quantize(argv[1], argv[5], &quantise) == 0, "quantised");

    auto load = llama_model_default_params();
    load.kv_overrides = known;
    const auto model = llama_model_load_from_file(argv[5], load);
    require(model, "loaded");
    auto options = llama_context_default_params();
    options.n_ctx = 256;
    options.n_threads = options.n_threads_batch = 1;
    const auto context = llama_init_from_model(model, options);
    require(context, "ready");
    std::vector<llama_token> ids;
    for (llama_token id; std::cin >> id;) ids.push_back(id);
    const int32_t count = int32_t(ids.size());
    const size_t vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    // All in one batch. If llama.cpp ignores the model's window, one token at a time, removing
    // positions outside the window before each.
    auto batch = llama_batch_init(count, 0, 1);
    for (int32_t i = 0; i < count; i++) {
        const int32_t at = batch.n_tokens++;
        batch.token[at] = ids[i];
        batch.pos[at] = i;
        batch.n_seq_id[at] = 1;
        batch.seq_id[at][0] = 0;
        batch.logits[at] = 1;
        if (window == 0 && i + 1 < count) continue;
        if (window > 0 && i >= window) {
            require(llama_memory_seq_rm(llama_get_memory(context), 0, 0, i - window + 1), "forgotten");
        }
        require(llama_decode(context, batch) == 0, "computed");
        fwrite(llama_get_logits(context), sizeof(float), vocabulary * batch.n_tokens, stdout);
        batch.n_tokens = 0;
    }
}
