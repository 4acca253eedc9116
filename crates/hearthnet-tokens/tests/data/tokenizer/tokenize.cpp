// Token ids by llama.cpp's own tokenizer, see README.md.
//
// usage: tokenize VOCABULARY.gguf plain|parse
//
// Input: texts, each after a line with its length in bytes. Output: a line of ids per text. Only
// the vocabulary is loaded, once.
#include "llama-arch.h"
#include "llama-model-loader.h"
#include "llama-vocab.h"
#include "llama.h"
#include <iostream>
#include <string>
#include <vector>

int main(int, char ** argv) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    std::vector<std::string> splits;
    llama_model_loader file(nullptr, nullptr, nullptr, argv[1], splits, nullptr, LLAMA_LOAD_MODE_NONE,
                            false, true, false, nullptr, nullptr);
    llama_vocab vocabulary;
    vocabulary.load(file, LLM_KV(file.get_arch()));
    const bool parse = std::string(argv[2]) == "parse";
    for (std::string length; std::getline(std::cin, length);) {
        std::string text(std::stoul(length), '\0');
        std::cin.read(text.data(), static_cast<std::streamsize>(text.size()));
        const char * between = "";
        for (auto id : vocabulary.tokenize(text, false, parse)) {
            std::cout << between << id;
            between = " ";
        }
        std::cout << "\n";
    }
}
