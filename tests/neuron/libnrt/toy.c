/* The toy language model of tests/ranks/toy.py: ranks divide values, the projection behind them and the vocabulary. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stand_in.h"

static toy_tensor_t *find(nrt_model_t *model, nrt_tensor_usage_t usage, const char *role) {
    for (int i = 0; i < model->num_tensors; i++)
        if (model->tensors[i].usage == usage && strcmp(model->tensors[i].role, role) == 0)
            return &model->tensors[i];
    return NULL;
}

static toy_tensor_t *find_layer(nrt_model_t *model, const char *format, int layer) {
    char role[64];
    snprintf(role, sizeof role, format, layer);
    return find(model, NRT_TENSOR_USAGE_INPUT, role);
}

static float *floats(toy_tensor_t *tensor) { return (float *)tensor->bound->data; }
static int32_t *ints(toy_tensor_t *tensor) { return (int32_t *)tensor->bound->data; }

/* y = W x + b, of W [outputs, inputs] */
static void multiply(toy_tensor_t *weight, toy_tensor_t *bias, const float *x, float *y) {
    uint32_t outputs = weight->shape[0], inputs = weight->shape[1];
    for (uint32_t o = 0; o < outputs; o++) {
        double sum = bias ? floats(bias)[o] : 0;
        for (uint32_t i = 0; i < inputs; i++)
            sum += (double)floats(weight)[o * inputs + i] * x[i];
        y[o] = (float)sum;
    }
}

/* Attends from one query over positions 0 to `position` of a slot, to values of `width` numbers each. */
static void attend(const float *query, const float *keys, const float *values, uint32_t hidden, uint32_t width,
                   uint32_t position, float *out) {
    double scores[position + 1], largest = -INFINITY, sum = 0;
    for (uint32_t p = 0; p <= position; p++) {
        scores[p] = 0;
        for (uint32_t h = 0; h < hidden; h++)
            scores[p] += (double)query[h] * keys[p * hidden + h];
        largest = fmax(largest, scores[p]);
    }
    for (uint32_t p = 0; p <= position; p++)
        sum += scores[p] = exp(scores[p] - largest);
    for (uint32_t h = 0; h < width; h++) {
        double value = 0;
        for (uint32_t p = 0; p <= position; p++)
            value += scores[p] / sum * values[p * width + h];
        out[h] = (float)value;
    }
}

NRT_STATUS run_toy(nrt_model_t *model) {
    if (model->answer) {
        toy_tensor_t *answered = find(model, NRT_TENSOR_USAGE_OUTPUT, "answer");
        memcpy(answered->bound->data, model->answer, answered->size);
        return NRT_SUCCESS;
    }
    toy_tensor_t *ids = find(model, NRT_TENSOR_USAGE_INPUT, "input_ids");
    toy_tensor_t *position_ids = find(model, NRT_TENSOR_USAGE_INPUT, "position_ids");
    toy_tensor_t *seq_ids = find(model, NRT_TENSOR_USAGE_INPUT, "seq_ids");
    toy_tensor_t *num_tokens = find(model, NRT_TENSOR_USAGE_INPUT, "num_tokens");
    toy_tensor_t *embedding = find(model, NRT_TENSOR_USAGE_INPUT, "embedding.weight");
    toy_tensor_t *head = find(model, NRT_TENSOR_USAGE_INPUT, "head.weight");
    toy_tensor_t *bias = find(model, NRT_TENSOR_USAGE_INPUT, "head.bias");
    toy_tensor_t *logits = find(model, NRT_TENSOR_USAGE_OUTPUT, "logits");
    toy_tensor_t *cache = find_layer(model, "k_cache.%d", 0);
    toy_tensor_t *rank = find(model, NRT_TENSOR_USAGE_INPUT, "rank");
    toy_tensor_t *zeros = find(model, NRT_TENSOR_USAGE_INPUT, "zeros");
    if (!ids || !position_ids || !seq_ids || !embedding || !head || !logits || !cache)
        return NRT_EXEC_BAD_INPUT;
    uint32_t rows = ids->shape[0], tokens = ids->shape[1], hidden = embedding->shape[1];
    uint32_t scratch = cache->shape[0] - 1, length = cache->shape[2], vocabulary = head->shape[0];
    for (uint32_t i = 0; i < rows * tokens; i++)
        if ((uint32_t)ints(ids)[i] >= embedding->shape[0] || (uint32_t)ints(position_ids)[i] >= length)
            return NRT_EXEC_OOB;
    /* A rank that is none of the group's is an index out of range, so that one rank's step can be made to fail. */
    if (rank && (uint32_t)ints(rank)[0] >= zeros->shape[0])
        return NRT_EXEC_OOB;
    NRT_STATUS status = NRT_SUCCESS;
    float *x = malloc(sizeof(float) * rows * tokens * hidden), query[hidden], out[hidden], sum[hidden];
    for (uint32_t i = 0; i < rows * tokens; i++)
        memcpy(x + i * hidden, floats(embedding) + ints(ids)[i] * hidden, sizeof(float) * hidden);
    for (int layer = 0; (cache = find_layer(model, "k_cache.%d", layer)) != NULL; layer++) {
        toy_tensor_t *values = find_layer(model, "v_cache.%d", layer);
        toy_tensor_t *q = find_layer(model, "layers.%d.q.weight", layer);
        toy_tensor_t *k = find_layer(model, "layers.%d.k.weight", layer);
        toy_tensor_t *v = find_layer(model, "layers.%d.v.weight", layer);
        toy_tensor_t *o = find_layer(model, "layers.%d.o.weight", layer);
        uint32_t width = v->shape[0];
        for (uint32_t i = 0; i < rows * tokens; i++) {
            uint32_t row = i / tokens, count = num_tokens ? (uint32_t)ints(num_tokens)[row] : 1;
            uint32_t slot = i % tokens < count ? (uint32_t)ints(seq_ids)[row] : scratch;
            size_t place = (size_t)slot * length + (uint32_t)ints(position_ids)[i];
            multiply(k, NULL, x + i * hidden, floats(cache) + place * hidden);
            multiply(v, NULL, x + i * hidden, floats(values) + place * width);
        }
        for (uint32_t i = 0; i < rows * tokens; i++) {
            size_t slot = (size_t)ints(seq_ids)[i / tokens] * length;
            multiply(q, NULL, x + i * hidden, query);
            attend(query, floats(cache) + slot * hidden, floats(values) + slot * width, hidden, width,
                   (uint32_t)ints(position_ids)[i], out);
            multiply(o, NULL, out, sum);
            status = status == NRT_SUCCESS ? sum_over_ranks(sum, hidden) : status;
            for (uint32_t h = 0; h < hidden; h++)
                x[i * hidden + h] += sum[h] / (1 + expf(-sum[h]));
        }
    }
    bool has_nan = false;
    for (uint32_t row = 0; status == NRT_SUCCESS && row < rows; row++) {
        uint32_t last = (num_tokens ? (uint32_t)ints(num_tokens)[row] : 1) - 1, all = logits->shape[1];
        float own[vocabulary], *gathered = floats(logits) + row * all;
        multiply(head, bias, x + (row * tokens + last) * hidden, own);
        status = gather_from_ranks(own, vocabulary, gathered);
        for (uint32_t i = 0; i < all; i++)
            has_nan |= isnan(gathered[i]);
    }
    free(x);
    return status == NRT_SUCCESS && has_nan ? NRT_EXEC_COMPLETED_WITH_NUM_ERR : status;
}
