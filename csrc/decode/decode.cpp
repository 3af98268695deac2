// Linear layers, attention and whole steps for one new token of each sequence, shared out by columns and by heads.

#include <atomic>

#include "../kernels/isa.h"
#include "../kernels/parallel.h"

namespace {

enum { COLUMNS_IN_PART = 192, PACKED_OUTPUTS = 16, BLOCKS_IN_PART = 8 };

struct Linear {
    const isa_kernels* isa;
    const pa_linear* layer;
};

struct Grouped {
    const isa_kernels* isa;
    const pa_grouped* layer;
    int64_t blocks;
};

void linear_some(void* context, int64_t part) {
    const Linear& all = *static_cast<Linear*>(context);
    const int64_t start = part * COLUMNS_IN_PART;
    all.isa->linear_part(all.layer, start, smaller(start + COLUMNS_IN_PART, all.layer->columns));
}

// The rows' integers have to be whole before a product begins.
void steps_some(void* context, int64_t row) {
    const Grouped& all = *static_cast<Grouped*>(context);
    all.isa->grouped_steps(all.layer, row);
}

void grouped_some(void* context, int64_t part) {
    const Grouped& all = *static_cast<Grouped*>(context);
    const int64_t start = part * BLOCKS_IN_PART;
    all.isa->grouped_part(all.layer, start, smaller(start + BLOCKS_IN_PART, all.blocks));
}

struct Attention {
    const isa_kernels* isa;
    const pa_attention* call;
    float* scratch;
    std::atomic<int64_t> next{0};
};

void attend_some(void* context, int64_t worker) {
    Attention& all = *static_cast<Attention*>(context);
    const pa_attention* const call = all.call;
    float* const scratch = all.scratch + worker * ((call->head + 15) / 16 * 16 + call->page * call->pages_row);
    for (int64_t mine; (mine = all.next.fetch_add(1, std::memory_order_relaxed)) < call->sequences * call->key_heads;)
        all.isa->attention_part(call, mine / call->key_heads, mine % call->key_heads, scratch);
}

bool is_decoded(int32_t type) { return type == PA_FLOAT32 || type == PA_BFLOAT16; }

}  // namespace

int32_t pa_linear_rows(const pa_linear* layer, int32_t threads) {
    if (!is_decoded(layer->type)) return PA_BAD_TYPE;
    if (layer->rows < 0 || layer->inner < 0 || layer->columns < 0 || (layer->w_row != 1 && layer->w_column != 1))
        return PA_BAD_COUNT;
    Linear all{isa_current(), layer};
    if (threads < 2)
        all.isa->linear_part(layer, 0, layer->columns);
    else
        parallel_for((layer->columns + COLUMNS_IN_PART - 1) / COLUMNS_IN_PART, threads, linear_some, &all);
    return 0;
}

int32_t pa_grouped_rows(const pa_grouped* layer, int32_t threads) {
    if (!is_decoded(layer->type)) return PA_BAD_TYPE;
    if (layer->rows < 0 || layer->inner < 1 || layer->columns < 1 || layer->group < 1 || (layer->bits != 8 && layer->bits != 4))
        return PA_BAD_COUNT;
    Grouped all{isa_current(), layer, (layer->columns + PACKED_OUTPUTS - 1) / PACKED_OUTPUTS};
    if (threads < 2) {
        for (int64_t row = 0; row < layer->rows; row++) all.isa->grouped_steps(layer, row);
        all.isa->grouped_part(layer, 0, all.blocks);
        return 0;
    }
    if (layer->rows < threads)
        for (int64_t row = 0; row < layer->rows; row++) all.isa->grouped_steps(layer, row);
    else
        parallel_for(layer->rows, threads, steps_some, &all);
    parallel_for((all.blocks + BLOCKS_IN_PART - 1) / BLOCKS_IN_PART, threads, grouped_some, &all);
    return 0;
}

int32_t pa_attend(const pa_attention* call, float* scratch, int32_t threads) {
    if (!is_decoded(call->type)) return PA_BAD_TYPE;
    if (call->key_heads < 1 || call->heads % call->key_heads || call->rotated > call->head || call->rotated % 2)
        return PA_BAD_COUNT;
    if (call->page < 1) return PA_BAD_COUNT;
    for (int64_t b = 0; b < call->sequences; b++) {
        const int64_t position = call->positions[b], page = position / call->page;
        if (position < 0 || page >= call->pages_row || call->slots[b] < 0) return PA_BAD_COUNT;
        for (int64_t i = 0; i <= page; i++)
            if (!call->pages[call->slots[b] * call->pages_row + i]) return PA_BAD_COUNT;
    }
    Attention all{isa_current(), call, scratch};
    const int32_t workers = threads > 1 ? threads : 1;
    parallel_for(workers, workers, attend_some, &all);
    return 0;
}

int32_t pa_steps(int64_t count, const pa_step* steps, int64_t rows, float* scratch, int32_t threads) {
    const isa_kernels* const isa = isa_current();
    for (int64_t i = 0; i < count; i++) {
        int32_t code = 0;
        if (steps[i].kind == PA_STEP_LINEAR) {
            pa_linear call = *static_cast<const pa_linear*>(steps[i].call);
            call.rows = rows;
            code = pa_linear_rows(&call, threads);
        } else if (steps[i].kind == PA_STEP_GROUPED) {
            pa_grouped call = *static_cast<const pa_grouped*>(steps[i].call);
            call.rows = rows;
            code = pa_grouped_rows(&call, threads);
        } else if (steps[i].kind == PA_STEP_ATTENTION) {
            pa_attention call = *static_cast<const pa_attention*>(steps[i].call);
            call.sequences = rows;
            code = pa_attend(&call, scratch, threads);
        } else if (steps[i].kind == PA_STEP_ROWWISE) {
            const pa_rowwise* const call = static_cast<const pa_rowwise*>(steps[i].call);
            if (!is_decoded(call->type)) return PA_BAD_TYPE;
            if (call->kind < 0 || call->kind >= PA_ROWWISE_COUNT) return PA_BAD_KIND;
            for (int64_t row = 0; row < rows; row++) isa->rowwise_part(call, row);
        } else {
            code = PA_BAD_KIND;
        }
        if (code) return code;
    }
    return 0;
}
